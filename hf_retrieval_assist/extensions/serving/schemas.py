"""Which JSON schemas xgrammar holds a text to.

It passes over what it does not know, and over much that stands beside something else, without an
error; texts would then be others than the schema asks for. The tables are those of xgrammar 0.2.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

_Schema = Mapping[str, Any]

# What it reads of each type, and nowhere else.
_OF_TYPES: dict[str, frozenset[str]] = {
    "object": frozenset(
        (
            *("properties", "required", "additionalProperties", "unevaluatedProperties"),
            *("patternProperties", "propertyNames", "minProperties", "maxProperties"),
        )
    ),
    "array": frozenset(("items", "prefixItems", "unevaluatedItems", "minItems", "maxItems")),
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "integer": frozenset(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    ),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    "boolean": frozenset(),
    "null": frozenset(),
}
# Where no type is named it takes these for objects and arrays.
_TYPICAL = {
    "object": {"properties", "additionalProperties", "unevaluatedProperties"},
    "array": {"items", "prefixItems", "unevaluatedItems"},
}
# What it reads alone; beside the first two a type may stand.
_ALONE = ("const", "enum", "$ref", "anyOf", "oneOf", "allOf")
_UNREAD = frozenset(
    (
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
        *("dependentRequired", "dependentSchemas", "dependencies", "additionalItems"),
        *("$dynamicRef", "$recursiveRef"),
    )
)
_KNOWN = _UNREAD.union(_ALONE, *_OF_TYPES.values())
# Where a schema holds others: in an object by their names, in a list, alone.
_BY_NAME, _LISTED = ("properties", "patternProperties"), ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "unevaluatedItems", "additionalProperties", "unevaluatedProperties")
# Constraints of a text of which it holds one alone.
_OF_TEXTS = ({"minLength", "maxLength"}, {"pattern"}, {"format"})
# Formats of JSON Schema that it does not know. Other unknown ones say nothing about a text.
_UNREAD_FORMATS = ("idn-email", "idn-hostname", "iri", "iri-reference", "regex")
_LOOKAHEAD = re.compile(r"(?<!\\)(?:\\\\)*\(\?[=!]")


def check_schema(schema: _Schema) -> None:
    """Refuse a schema that xgrammar would hold a text to in part alone.

    Raises:
        ValueError: says what of the schema, and where.
    """
    waiting: deque[tuple[str, Any]] = deque([("", schema)])
    seen: set[str] = set()
    while waiting:
        place, found = waiting.popleft()
        if place in seen or not isinstance(found, Mapping):
            continue  # true, or what xgrammar refuses
        seen.add(place)
        for fault in _faults(schema, found):
            raise ValueError(
                f"expected a schema that text can be held to, got {fault} at {place[1:] or '#'}"
            )
        waiting += _inside(schema, place, found)


def _faults(root: _Schema, schema: _Schema) -> Iterator[str]:
    """What of a schema would be passed over."""
    keywords = {name for name in schema if name in _KNOWN}
    if schema.get("uniqueItems") is False:
        keywords.remove("uniqueItems")
    yield from sorted(keywords & _UNREAD)
    types = _types(schema)
    if whole := next((name for name in _ALONE if name in keywords), None):
        yield from (f"{name} beside {whole}" for name in sorted(keywords - {whole}))
        if "type" in schema and whole not in ("const", "enum"):
            yield f"a type beside {whole}"
        if whole == "$ref" and _referred(root, schema["$ref"]) is None:
            yield f"a $ref to {schema['$ref']!r:.80}, where there is nothing in this schema"
        branches = schema[whole] if isinstance(schema[whole], list) else []
        if whole == "allOf" and len(branches) > 1:
            yield "several schemas in allOf"
        if whole == "oneOf" and not _apart([_followed(root, one) for one in branches]):
            yield "schemas in oneOf that one value may fulfil together"
        return
    if "type" not in schema:
        types = [name for name, typical in _TYPICAL.items() if keywords & typical]
    for name in sorted(keywords):
        if not any(name in _OF_TYPES[kind] for kind in types):
            yield f"{name} without the type that has it"
    if "multipleOf" in keywords and ("number" in types or keywords & _OF_TYPES["number"]):
        yield "multipleOf of a number, or beside a bound"
    if sum(bool(kind & keywords) for kind in _OF_TEXTS) > 1:
        yield "more than one of a length, a pattern and a format"
    if schema.get("format") in _UNREAD_FORMATS:
        yield f"the format {schema['format']}"
    if _LOOKAHEAD.search(str(schema.get("pattern"))):
        yield "a pattern that looks ahead"
    properties, patterns = (_object(schema.get(name)) for name in _BY_NAME)
    for name in _texts(schema.get("required")):
        if name not in properties:
            yield f"required {name!r:.80}, which is none of the properties"
    if len(patterns) > 1 or (patterns and (properties or "propertyNames" in schema)):
        yield "patternProperties beside other names"
    if (properties or schema.get("additionalProperties") is False) and "propertyNames" in schema:
        yield "propertyNames beside properties"


def _inside(root: _Schema, place: str, schema: _Schema) -> Iterator[tuple[str, Any]]:
    """The schemas inside of one, by their places."""
    if "$ref" in schema:
        yield str(schema["$ref"]), _referred(root, schema["$ref"])
    for name in _SINGLE:
        yield f"{place}.{name}", schema.get(name)
    for name in _BY_NAME:
        for key, inner in _object(schema.get(name)).items():
            yield f"{place}.{name}.{key}", inner
    for name in _LISTED:
        found = schema.get(name)
        for number, inner in enumerate(found if isinstance(found, list) else ()):
            yield f"{place}.{name}.{number}", inner
    if names := _object(schema.get("propertyNames")):
        text = {} if names.keys() & {*_ALONE} else {"type": "string"}
        yield f"{place}.propertyNames", {**text, **names}


def _object(found: Any) -> _Schema:
    return found if isinstance(found, Mapping) else {}


def _texts(found: Any) -> list[str]:
    """A text alone, or those of a list."""
    several = found if isinstance(found, list) else [found]
    return [one for one in several if isinstance(one, str)]


def _types(schema: _Schema) -> list[str]:
    return [one for one in _texts(schema.get("type")) if one in _OF_TYPES]


def _referred(root: _Schema, reference: Any) -> Any:
    """What a reference names inside of the whole schema; None: nothing."""
    if not isinstance(reference, str) or not re.match("#(/|$)", reference):
        return None
    found: Any = root
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(name) if isinstance(found, list) else name]
        except (KeyError, IndexError, TypeError, ValueError):
            return None
    return found


def _followed(root: _Schema, schema: Any) -> _Schema:
    """A schema, or the one that it refers to."""
    for _ in range(len(_KNOWN)):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            break
        schema = _referred(root, schema["$ref"])
    return _object(schema)


def _apart(branches: Sequence[_Schema]) -> bool:
    """Whether no value fulfils two schemas: they are of one value each or of different types, and
    those of objects require a property of another value each."""
    if len(branches) < 2:
        return True
    if all("const" in one for one in branches):
        return _differ(one["const"] for one in branches)
    objects = [one for one in branches if one.get("type") == "object"]
    kinds = ["object"] if objects else []
    for one in branches:
        if one.get("type") != "object":
            # Integers are numbers.
            of_types = ["number" if kind == "integer" else kind for kind in _types(one)]
            kinds += {*of_types} or ["", ""]
    tags = [_tags(one) for one in objects]
    common = set.intersection(*map(set, tags)) if tags else set()
    told = any(_differ(own[name] for own in tags) for name in common)
    return _differ(kinds) and (len(objects) < 2 or told)


def _differ(values: Iterable[Any]) -> bool:
    texts = [json.dumps(one) for one in values]
    return len({*texts}) == len(texts)


def _tags(schema: _Schema) -> dict[str, Any]:
    """The properties that are required and have one value."""
    properties = _object(schema.get("properties"))
    found = {name: _object(properties.get(name)) for name in _texts(schema.get("required"))}
    return {name: one["const"] for name, one in found.items() if "const" in one}
