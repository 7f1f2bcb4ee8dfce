"""Forms that an output is expected to fill in: texts with blanks, such as JSON of a known schema.

The output is not constrained, and may leave a form or never begin one. A form is drafted from as
long as the output keeps to it: once the output ends with the beginning of a printed part, the rest
of that part is likely to follow.

For the form of a schema or a tool call, a value is made up with a mark in each place that a model
has to fill in, and rendered: as JSON in the usual layouts, or by a tokenizer's chat template. What
stands between marks is printed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ...host.chat_templates import rendered_call

_DEEPEST = 32  # schemas within schemas
_LARGEST = 2000  # values of one schema, and choices for one of them
# Marks: a character within strings, a number elsewhere, each plus the number of its choices.
_STRING, _NUMBER = 0xE000, 7_000_000_000_000
_MARK = re.compile("[\ue000-\uf8ff]+|7[0-9]{12}")
_LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"separators": (",", ":")},
    {"indent": 2},
    {"indent": 4},
)


@dataclass(frozen=True)
class Form:
    """A text with blanks.

    Attributes:
        parts: what is printed: before the first blank, between blanks and behind the last one.
        choices: for each part what may fill in the blank behind it; empty: anything.
    """

    parts: tuple[str, ...]
    choices: tuple[tuple[str, ...], ...]


def expected_forms(schema: Any, tools: Sequence[Any], tokenizer: Any) -> Forms:
    """What `Assistant.expecting` makes of its arguments; raises what that says."""
    if tokenizer is None:
        raise TypeError("expecting: expected a tokenizer with schema or tools, got None")
    found = schema_forms(schema) if schema is not None else []
    return Forms([*found, *tool_forms(tools, tokenizer)], tokenizer)


class Forms:
    """Forms, any of which may be filled in anywhere in an output, with the tokenizer of the model.

    Safe to share between threads.
    """

    def __init__(self, forms: Sequence[Form], tokenizer: Any) -> None:
        self.forms = tuple(dict.fromkeys(form for form in forms if form.parts[0]))
        self._tokenizer = tokenizer
        self._anchor = self._encoded("a")[-1:]
        self.text_of = cache(self._text_of)
        self.ids_of = cache(self._ids_of)

    def _text_of(self, tokens: tuple[int, ...]) -> str:
        """What tokens add to a text."""
        # Another token stands in front: tokenizers drop a space in front of the first one.
        before, after = map(self._decoded, (self._anchor, [*self._anchor, *tokens]))
        return after[len(before) :]

    def _ids_of(self, text: str) -> list[int]:
        """The tokens that go on with `text`; empty where the tokenizer spells it otherwise."""
        # Another text stands in front where the tokenizer puts a space before the first one.
        for before in ("", "\n", "a"):
            ids = self._encoded(before + text)
            for start in range(3):
                if self.text_of(tuple(ids[start:])) == text:
                    return ids[start:]
        return []

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def schema_forms(schema: Any) -> list[Form]:
    """The forms of JSON that agrees with a schema, one for each layout.

    Args:
        schema: a JSON schema, or a pydantic model class.

    Raises:
        TypeError: neither of these.
    """
    described = getattr(schema, "model_json_schema", None)
    schema = described() if described is not None else schema
    if not isinstance(schema, Mapping):
        raise TypeError(
            "schema: expected a JSON schema (a dict) or a pydantic model class, got "
            f"{type(schema).__name__}"
        )
    marked = _Marked(schema)
    value = marked.value(schema)
    return [marked.form(json.dumps(value, ensure_ascii=False, **layout)) for layout in _LAYOUTS]


def tool_forms(tools: Sequence[Any], tokenizer: Any) -> list[Form]:
    """The forms of calls of tools, as the tokenizer's chat template writes them.

    Args:
        tools: as `apply_chat_template` takes them: functions, or descriptions in JSON.
        tokenizer: with a chat template.

    Raises:
        TypeError: a tool that is neither.
        ValueError: a tool without a name, or a template that writes no calls. Whatever the template
            raises comes through.
    """
    described = [_described(tool) for tool in tools]
    return [_tool_form(tool, described, tokenizer) for tool in described]


def _described(tool: Any) -> Mapping[str, Any]:
    """{"type": "function", "function": {"name": …, "parameters": …}}."""
    if callable(tool):
        from transformers.utils import get_json_schema

        return get_json_schema(tool)
    if not isinstance(tool, Mapping):
        raise TypeError(f"tools: expected functions or JSON schemas, got {type(tool).__name__}")
    tool = tool if "function" in tool else {"type": "function", "function": tool}
    if not isinstance(tool["function"].get("name"), str):
        raise ValueError(f"tools: expected each to have a name, got {str(tool)[:80]}")
    return tool


def _tool_form(tool: Mapping[str, Any], tools: Sequence[Mapping[str, Any]], tokenizer: Any) -> Form:
    function = tool["function"]
    parameters = function.get("parameters") or {}
    marked = _Marked(parameters)
    arguments = marked.value({"properties": {}, **parameters})
    call = {"name": function["name"], "arguments": arguments}
    text = rendered_call(tokenizer, tools, call, 9 * chr(_STRING))
    if function["name"] not in text:
        raise ValueError("tools: expected a chat template that writes tool calls, got one without")
    return marked.form(text)


class _Marked:
    """Values of a schema, with marks where a model has something to fill in."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._root = schema
        self._left = _LARGEST
        self._choices: list[tuple[str, ...]] = [()]

    def form(self, text: str) -> Form:
        """The form that a rendered value comes to."""
        parts, choices, start = [], [], 0
        for mark in _MARK.finditer(text):
            parts.append(text[start : mark.start()])
            choices.append(self._choices_of(mark[0]))
            start = mark.end()
        if text[start:]:
            parts.append(text[start:])
            choices.append(())
        return Form(tuple(parts), tuple(choices))

    def _choices_of(self, mark: str) -> tuple[str, ...]:
        number = int(mark) - _NUMBER if mark[0] == "7" else ord(mark[0]) - _STRING
        # Where the schema itself holds what looks like a mark, nothing is known of it.
        return self._choices[number] if number < len(self._choices) else ()

    def value(self, schema: Any, depth: int = 0) -> Any:
        """A value that agrees with a schema; a mark where that is not understood."""
        self._left -= 1
        if not isinstance(schema, Mapping) or depth > _DEEPEST or self._left < 0:
            return _NUMBER
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._one_of(schema["enum"])
        if isinstance(schema.get("properties"), Mapping):
            return {
                str(name): self.value(one, depth + 1)
                for name, one in schema["properties"].items()
                if self._left >= 0
            }
        for other in self._others(schema):
            return self.value(other, depth + 1)
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = next((one for one in kind if one != "null"), None)
        if kind == "array" and "items" in schema:
            return [self.value(schema["items"], depth + 1)]
        if kind == "boolean":
            return self._one_of([True, False])
        return chr(_STRING) if kind == "string" else _NUMBER

    def _one_of(self, values: Any) -> Any:
        """The value where there is one only, otherwise a mark with choices."""
        if not isinstance(values, list) or not 0 < len(values) <= _LARGEST:
            return _NUMBER
        if len(values) == 1:
            return values[0]
        self._choices.append(tuple(json.dumps(value, ensure_ascii=False) for value in values))
        number = len(self._choices) - 1
        if not all(isinstance(value, str) for value in values):
            return _NUMBER + number
        self._choices[-1] = tuple(choice[1:-1] for choice in self._choices[-1])
        return chr(_STRING + number)

    def _others(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        """The schemas that stand for this one."""
        if "$ref" in schema:
            yield self._referred(schema["$ref"])
        for name in ("allOf", "anyOf", "oneOf"):
            among = schema.get(name)
            if isinstance(among, list):
                yield from (one for one in among if one != {"type": "null"})

    def _referred(self, reference: Any) -> Any:
        """What a reference within the schema names; None where there is nothing."""
        found: Any = self._root
        for key in str(reference).removeprefix("#").strip("/").split("/"):
            found = found.get(key) if isinstance(found, Mapping) else None
        return found
