"""Which JSON schemas xgrammar holds a text to.

It passes over what it does not know, and over much that stands beside something else, without an
error; texts would then be others than the schema asks for. The tables are those of xgrammar 0.2.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn
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
# What it reads alone; beside the first two a type may stand that their values have.
_ALONE = ("const", "enum", "$ref", "anyOf", "oneOf", "allOf")
_UNREAD = frozenset(
    (
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
        *("dependentRequired", "dependentSchemas", "dependencies", "additionalItems"),
        *("$dynamicRef", "$recursiveRef"),
    )
)
_KNOWN = _UNREAD.union(_ALONE, *_OF_TYPES.values())
# Formats of JSON Schema that it does not know. Other unknown ones say nothing about a text.
_UNREAD_FORMATS = ("idn-email", "idn-hostname", "iri", "iri-reference", "regex")
_LOOKAHEAD = re.compile(r"(?<!\\)(?:\\\\)*\(\?[=!]")
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


def check_schema(schema: _Schema) -> None:
    """Refuse a schema that xgrammar would hold a text to in part alone.

    Raises:
        ValueError: says what of the schema, and where.
    """
    waiting: deque[tuple[str, Any]] = deque([("", schema)])
    seen: set[str] = set()
    while waiting:
        place, found = waiting.popleft()
        if not isinstance(found, Mapping):
            continue  # true, or what xgrammar refuses
        for name, inner in _inside(schema, place, found):
            if name.startswith("#"):
                if name in seen:
                    continue
                seen.add(name)
            waiting.append((name, inner))


def _refuse(place: str, found: str) -> NoReturn:
    raise ValueError(
        f"expected a schema that text can be held to, got {found} at {place[1:] or '#'}"
    )


def _inside(root: _Schema, place: str, schema: _Schema) -> Iterator[tuple[str, Any]]:
    """The schemas inside of one, by their places."""
    keywords = {name for name in schema if name in _KNOWN}
    if schema.get("uniqueItems") is False:
        keywords.remove("uniqueItems")
    if unread := keywords & _UNREAD:
        _refuse(place, min(unread))
    whole = next((name for name in _ALONE if name in keywords), None)
    types = _types(schema)
    if whole is not None:
        if beside := keywords - {whole}:
            _refuse(place, f"{min(beside)} beside {whole}")
        if whole in ("const", "enum"):
            values = [schema[whole]] if whole == "const" else schema[whole]
            if "type" in schema and not _kinds_of(values) <= _kinds(types):
                _refuse(place, f"a type that not all values of {whole} have")
        elif "type" in schema:
            _refuse(place, f"a type beside {whole}")
        elif whole == "$ref":
            yield str(schema[whole]), _referred(root, place, schema[whole])
        else:
            branches = schema[whole] if isinstance(schema[whole], list) else []
            if whole == "allOf" and len(branches) > 1:
                _refuse(place, "several schemas in allOf")
            if whole == "oneOf" and not _apart([_followed(root, one) for one in branches]):
                _refuse(place, "schemas in oneOf that one value may fulfil together")
            yield from _numbered(f"{place}.{whole}", branches)
        return
    if "type" not in schema:
        types = [name for name, typical in _TYPICAL.items() if keywords & typical]
    for name in sorted(keywords):
        if not any(name in _OF_TYPES[kind] for kind in types):
            _refuse(place, f"{name} without the type that has it")
    if "multipleOf" in keywords and ("number" in types or keywords & _OF_TYPES["number"]):
        _refuse(place, "multipleOf of a number, or beside a bound")
    _check_text(place, schema)
    yield from _members(place, schema)
    for name in ("items", "unevaluatedItems"):
        if name in schema:
            yield f"{place}.{name}", schema[name]
    yield from _numbered(f"{place}.prefixItems", schema.get("prefixItems"))


def _check_text(place: str, schema: _Schema) -> None:
    kinds = [{"minLength", "maxLength"}, {"pattern"}, {"format"}]
    if sum(bool(kind & schema.keys()) for kind in kinds) > 1:
        _refuse(place, "more than one of a length, a pattern and a format")
    if schema.get("format") in _UNREAD_FORMATS:
        _refuse(place, f"the format {schema['format']}")
    if _LOOKAHEAD.search(str(schema.get("pattern"))):
        _refuse(place, "a pattern that looks ahead")


def _members(place: str, schema: _Schema) -> Iterator[tuple[str, Any]]:
    """The schemas inside of an object's."""
    properties = _object(schema.get("properties"))
    patterns = _object(schema.get("patternProperties"))
    required = schema.get("required")
    for name in required if isinstance(required, list) else ():
        if name not in properties:
            _refuse(place, f"required {name!r:.80}, which is none of the properties")
    if len(patterns) > 1 or (patterns and (properties or "propertyNames" in schema)):
        _refuse(place, "patternProperties beside other names")
    if (properties or schema.get("additionalProperties") is False) and "propertyNames" in schema:
        _refuse(place, "propertyNames beside properties")
    yield from ((f"{place}.properties.{name}", one) for name, one in properties.items())
    yield from ((f"{place}.patternProperties.{name}", one) for name, one in patterns.items())
    for name in ("additionalProperties", "unevaluatedProperties"):
        if name in schema:
            yield f"{place}.{name}", schema[name]
    if names := _object(schema.get("propertyNames")):
        text = {} if names.keys() & {*_ALONE} else {"type": "string"}
        yield f"{place}.propertyNames", {**text, **names}


def _object(found: Any) -> _Schema:
    return found if isinstance(found, Mapping) else {}


def _numbered(place: str, schemas: Any) -> Iterator[tuple[str, Any]]:
    for number, one in enumerate(schemas if isinstance(schemas, list) else ()):
        yield f"{place}.{number}", one


def _types(schema: _Schema) -> Sequence[str]:
    named = schema.get("type")
    several = named if isinstance(named, list) else [] if named is None else [named]
    return [one for one in several if isinstance(one, str) and one in _OF_TYPES]


def _kinds(types: Iterable[str]) -> set[str]:
    """Types, of which none is a part of another."""
    return {kind for one in types for kind in ((one, "integer") if one == "number" else (one,))}


def _kinds_of(values: Any) -> set[str]:
    values = values if isinstance(values, list) else []
    return {_TYPES.get(type(one), "array" if isinstance(one, list) else "object") for one in values}


def _referred(root: _Schema, place: str, reference: Any) -> Any:
    """What a reference names inside of the whole schema."""
    if not isinstance(reference, str) or not re.match("#(/|$)", reference):
        _refuse(place, f"a $ref to {reference!r:.80}, which is no place in this schema")
    found: Any = root
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(name) if isinstance(found, list) else name]
        except (KeyError, IndexError, TypeError, ValueError):
            _refuse(place, f"a $ref to {reference!r:.80}, where there is nothing")
    return found


def _followed(root: _Schema, schema: Any) -> _Schema:
    """A schema, or the one that it refers to."""
    for _ in range(len(_KNOWN)):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            break
        schema = _referred(root, "", schema["$ref"])
    return _object(schema)


def _apart(branches: Sequence[_Schema]) -> bool:
    """Whether no value fulfils two schemas: they are of one value each or of different types, and
    those of objects require a property of another value each."""
    if len(branches) < 2:
        return True
    if all("const" in one for one in branches):
        return _differ(one["const"] for one in branches)
    objects = [one for one in branches if one.get("type") == "object"]
    others = [one for one in branches if one.get("type") != "object"]
    kinds = [kind for one in others for kind in _kinds(_types(one)) or [""]]
    kinds += ["object"] if objects else []
    tags = [_tags(one) for one in objects]
    common = set.intersection(*map(set, tags)) if tags else set()
    told = any(_differ(own[name] for own in tags) for name in common)
    return _differ(kinds) and "" not in kinds and (len(objects) < 2 or told)


def _differ(values: Iterable[Any]) -> bool:
    texts = [json.dumps(one) for one in values]
    return len({*texts}) == len(texts)


def _tags(schema: _Schema) -> dict[str, Any]:
    """The properties that are required and have one value."""
    properties = _object(schema.get("properties"))
    named = schema.get("required")
    required = [one for one in named if isinstance(one, str)] if isinstance(named, list) else []
    found = {name: _object(properties.get(name)) for name in required}
    return {name: one["const"] for name, one in found.items() if "const" in one}
