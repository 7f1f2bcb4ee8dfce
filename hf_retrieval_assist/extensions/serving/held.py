"""Answers that are held to something: a schema, a call of a tool, tokens that came already."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from transformers import LogitsProcessor

from ...host.chat_templates import rendered_call
from .grammars import Form, Grammars
from .refusals import RefusedError
from .schemas import check_schema
from .written import Call

_MARKED = {"\ue000": "\ue001"}  # arguments that no tool has
_LONGEST = 1 << 16  # characters of the schemas of a request


class Penalties(LogitsProcessor):
    """Takes from the logits of tokens that were generated.

    Args:
        presence: from those that came.
        frequency: for each time that they came.
        length: tokens of the prompt, which do not count.
    """

    def __init__(self, presence: float, frequency: float, length: int) -> None:
        self._presence, self._frequency, self._length = presence, frequency, length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for row, ids in enumerate(input_ids[:, self._length :]):
            tokens, counts = ids.unique(return_counts=True)
            scores[row, tokens] -= self._presence + self._frequency * counts
        return scores


class Held:
    """What the text of an answer can be held to, by xgrammar. One thread at a time.

    Args:
        model: that writes it.
        tokenizer: the model's.
        ends: ids of tokens that end an answer.
    """

    def __init__(self, model: Any, tokenizer: Any, ends: frozenset[int]) -> None:
        self._model, self._tokenizer, self._ends = model, tokenizer, ends
        self._grammars: Grammars | None = None

    def to_schema(self, field: str, schema: Mapping[str, Any], tenant: str | None) -> Holding:
        """Hold answers of a tenant's to a JSON schema.

        Raises:
            RefusedError: the library is missing, or cannot hold a text to such a schema.
        """
        _check(field, "", schema)
        return self._holding(field, (("", json.dumps(schema), ""),), tenant)

    def check_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Refuse tools whose arguments are strictly of a schema that no text can be held to."""
        for tool in tools:
            function = tool["function"]
            if function.get("strict") and (schema := function.get("parameters")) is not None:
                _check("tools", f"{function['name']}: ", schema)

    def to_call(
        self, tools: Sequence[Mapping[str, Any]], name: str | None, tenant: str | None
    ) -> tuple[Holding, Callable[[str], Call | None]]:
        """Hold answers of a tenant's to one call of a tool, by its name or of any.

        Returns:
            What does so, and what gives the call that such an answer spells.

        Raises:
            RefusedError: the library is missing, there is no such tool, or the model's chat
                template writes calls in a form that is not known.
        """
        named = {tool["function"]["name"]: tool for tool in tools}
        if not named or (name is not None and name not in named):
            got = f"no tool of the name {name!r}" if named else "no tools"
            raise RefusedError(f"tool_choice: expected one of the tools, got {got}", "tool_choice")
        around, forms = {}, []
        for one in [*named] if name is None else [name]:
            before, after = around[one] = self._around(named[one])
            parameters = named[one]["function"].get("parameters") or {"type": "object"}
            forms.append((before, json.dumps(parameters), after))

        def read(text: str) -> Call | None:
            for one, (before, after) in around.items():
                if text.startswith(before) and text.endswith(after):
                    return Call(one, text[len(before) : len(text) - len(after)])
            return None

        return self._holding("tools", tuple(forms), tenant), read

    def _around(self, tool: Mapping[str, Any]) -> tuple[str, str]:
        """What a chat template writes before and behind the arguments of a call."""
        call = {"name": tool["function"]["name"], "arguments": _MARKED}
        try:
            text = rendered_call(self._tokenizer, [tool], call, 9 * "0")
        except Exception as error:
            raise self._refused(f"{type(error).__name__}: {error}") from error
        for ascii_only in (False, True):
            head, found, tail = text.partition(json.dumps(_MARKED, ensure_ascii=ascii_only))
            if found and call["name"] in head:
                break
        else:
            raise self._refused("no arguments in JSON behind a name")
        ends = [self._tokenizer.decode([token]) for token in self._ends]
        cuts = (at for end in ends if (at := tail.find(end)) >= 0)
        tail = tail[: min(cuts, default=len(tail))]
        ids = self._tokenizer(head + tail, add_special_tokens=False).input_ids
        if special := {*ids} & {*self._tokenizer.all_special_ids}:
            raise self._refused(f"the token {self._tokenizer.decode([min(special)])!r}")
        return head, tail

    def _refused(self, found: str) -> RefusedError:
        return RefusedError(
            "tool_choice: expected a model whose chat template writes calls as a name and "
            f"arguments in JSON, got {found}",
            "tool_choice",
            "unsupported_value",
        )

    def _holding(self, field: str, forms: tuple[Form, ...], tenant: str | None) -> Holding:
        try:
            import xgrammar
        except ImportError as error:
            raise RefusedError(
                f"{field}: expected the extra named structured, which this server lacks ({error})",
                field,
                "unsupported_value",
            ) from error
        if (length := sum(len(schema) for _, schema, _ in forms)) > _LONGEST:
            said = f"{field}: expected at most {_LONGEST:,} characters of schemas, got {length:,}"
            raise RefusedError(said, field)
        if self._grammars is None:
            info = xgrammar.TokenizerInfo.from_huggingface(
                self._tokenizer,
                vocab_size=len(self._model.get_output_embeddings().weight),
                stop_token_ids=[*self._ends],
            )
            self._grammars = Grammars(info)
        try:
            grammar = self._grammars.compiled(forms, tenant)
        except (RuntimeError, ValueError) as error:
            raise RefusedError(f"{field}: {error}", field) from error
        return lambda: xgrammar.contrib.hf.LogitsProcessor(grammar)

    def forget(self) -> None:
        """Forget the schemas of earlier requests."""
        if self._grammars is not None:
            self._grammars.compiled.cache_clear()

    def close(self) -> None:
        """End what compiles."""
        if self._grammars is not None:
            self._grammars.close()


# What holds one answer, made for each: it follows the answer's text.
Holding: TypeAlias = Callable[[], LogitsProcessor]


def _check(field: str, where: str, schema: Mapping[str, Any]) -> None:
    try:
        check_schema(schema)
    except ValueError as error:
        raise RefusedError(f"{field}: {where}{error}", field) from error
