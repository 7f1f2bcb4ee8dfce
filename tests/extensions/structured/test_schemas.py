"""Which schemas are refused, since xgrammar would hold a text to a part of them alone."""

import json

import pytest

from hf_retrieval_assist.extensions.serving.schemas import check_schema

INTEGER, TEXT, ANY = {"type": "integer"}, {"type": "string"}, {}


def record(required=(), **properties):
    return {"type": "object", "properties": properties, "required": [*required]}


def tagged(*tags):
    return [record(["kind"], kind={"const": tag}, value=INTEGER) for tag in tags]


# Schemas by what is wrong with them, each with a text that it forbids and xgrammar lets pass.
LOOSE = {
    "not": ({"not": TEXT}, '"a"'),
    "not beside a type": (INTEGER | {"not": {"const": 3}}, "3"),
    "if": ({"if": INTEGER, "then": {"type": "integer", "minimum": 3}}, "2"),
    "dependentRequired": (record(a=ANY, b=ANY) | {"dependentRequired": {"a": ["b"]}}, '{"a": 1}'),
    "dependentSchemas": (
        record(a=ANY, b=ANY) | {"dependentSchemas": {"a": {"required": ["b"]}}},
        '{"a": 1}',
    ),
    "dependencies": (record(a=ANY, b=ANY) | {"dependencies": {"a": ["b"]}}, '{"a": 1}'),
    "contains": ({"type": "array", "items": True, "contains": INTEGER}, '["a"]'),
    "uniqueItems": ({"type": "array", "items": INTEGER, "uniqueItems": True}, "[1, 1]"),
    "$dynamicRef": (record(a={"$dynamicRef": "#n"}) | {"$dynamicAnchor": "n"}, '{"a": 1}'),
    "remote $ref": ({"$ref": "https://example.com/number.json"}, '"a"'),
    "$ref to an anchor": ({"$defs": {"x": INTEGER | {"$anchor": "y"}}, "$ref": "#y"}, '"a"'),
    "beside $ref": ({"$defs": {"x": INTEGER}, "$ref": "#/$defs/x", "minimum": 3}, "2"),
    "beside anyOf": ({"minimum": 3, "anyOf": [INTEGER]}, "2"),
    "a type beside anyOf": (INTEGER | {"anyOf": [{"minimum": 5}, {"maximum": 2}]}, '"a"'),
    "beside enum": ({"enum": ["a", "b"], "pattern": "^a$"}, '"b"'),
    "oneOf": ({"oneOf": [INTEGER, {"type": "number"}]}, "1"),
    "oneOf of objects": ({"oneOf": [record(a=INTEGER), record(b=INTEGER)]}, "{}"),
    "oneOf of equal values": ({"oneOf": [{"const": 1}, {"enum": [2, 1]}]}, "1"),
    "several schemas in allOf": ({"allOf": [INTEGER, {"type": "integer", "minimum": 3}]}, "2"),
    "minLength": ({"minLength": 2}, '"a"'),
    "minimum": ({"minimum": 3}, "2"),
    "minItems": ({"minItems": 2}, "[1]"),
    "required without properties": ({"type": "object", "required": ["a"]}, "{}"),
    "required": (record(["b"], a=ANY), '{"a": 1}'),
    "multipleOf of a number": ({"type": "number", "multipleOf": 0.5}, "1.3"),
    "multipleOf beside a bound": (INTEGER | {"multipleOf": 3, "minimum": 3}, "4"),
    "a pattern and a length": (TEXT | {"pattern": "^a+$", "maxLength": 2}, '"aaa"'),
    "a format and a length": (TEXT | {"format": "date", "minLength": 12}, '"2020-01-01"'),
    "a format and a pattern": (TEXT | {"format": "date", "pattern": "^2.*"}, '"1999-01-01"'),
    "a pattern that looks ahead": (TEXT | {"pattern": "^(?!a).*$"}, '"a"'),
    "the format idn-email": (TEXT | {"format": "idn-email"}, '"a"'),
    "the format iri": (TEXT | {"format": "iri"}, '" "'),
    "the format regex": (TEXT | {"format": "regex"}, '"("'),
    "propertyNames": (record(bb=INTEGER) | {"propertyNames": {"maxLength": 1}}, '{"bb": 1}'),
    "patternProperties": (
        record(ab=TEXT) | {"patternProperties": {"^a.*": INTEGER}},
        '{"ab": "x"}',
    ),
    "several patternProperties": (
        {"type": "object", "patternProperties": {"^a$": INTEGER, "^[ab]$": TEXT}},
        '{"a": 1}',
    ),
}
# The same deep inside of others.
INSIDE = {
    "properties": lambda inner: record(a=record(b=inner)),
    "items": lambda inner: {"type": "array", "items": inner},
    "prefixItems": lambda inner: {"type": "array", "prefixItems": [INTEGER, inner]},
    "additionalProperties": lambda inner: {"type": "object", "additionalProperties": inner},
    "patternProperties": lambda inner: {"type": "object", "patternProperties": {"^a$": inner}},
    "propertyNames": lambda inner: {"type": "object", "propertyNames": inner},
    "anyOf": lambda inner: {"anyOf": [{"type": "null"}, inner]},
    "allOf": lambda inner: {"allOf": [inner]},
    "$ref": lambda inner: record(a={"$ref": "#/$defs/x~1y"}) | {"$defs": {"x/y": inner}},
    "$ref to a list": lambda inner: {"anyOf": [inner, {"$ref": "#/anyOf/0"}]},
}
HELD = {
    "anything": {},
    "annotations": TEXT | {"title": "t", "default": 1, "examples": [2], "$comment": "c", "x-y": 1},
    "what nothing refers to": {"$defs": {"x": {"not": {}}}} | INTEGER,
    "recursion": record(
        ["value"], value=INTEGER, next={"anyOf": [{"$ref": "#"}, {"type": "null"}]}
    ),
    "a reference beside a description": record(a={"$ref": "#/$defs/x", "description": "d"})
    | {"$defs": {"x": {"enum": ["a", "b"], "type": "string"}}},
    "a reference in allOf": record(a={"allOf": [{"$ref": "#/$defs/x"}]}) | {"$defs": {"x": TEXT}},
    "values of a type": {"type": ["integer", "null"], "enum": [1, None, 3]},
    "false": {"const": False, "type": "boolean"},
    "oneOf of types": {"oneOf": [INTEGER, TEXT, {"type": "null"}, {"type": "array"}]},
    "oneOf of tags": {"oneOf": [*tagged("a", "b"), {"type": "null"}]},
    "oneOf of references": {
        "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        "$defs": dict(zip("ab", tagged("a", "b"), strict=True)),
        "discriminator": {"propertyName": "kind"},
    },
    "bounds": record(
        a=INTEGER | {"minimum": 0, "exclusiveMaximum": 10},
        b={"type": "number", "exclusiveMinimum": 0},
        c=TEXT | {"minLength": 1, "maxLength": 9},
        d={"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3, "uniqueItems": False},
        e=INTEGER | {"multipleOf": 5},
    ),
    "formats": record(a=TEXT | {"format": "date-time"}, b=TEXT | {"format": "password"}),
    "a pattern": TEXT | {"pattern": r"^[A-Z]{2}\(\?\d+$"},
    "types by their keywords": {"properties": {"a": {"items": INTEGER}}, "required": ["a"]},
    "names": {
        "type": "object",
        "propertyNames": {"pattern": "^[a-z]$"},
        "additionalProperties": ANY,
    },
}


@pytest.mark.parametrize("name", LOOSE)
def test_what_is_held_in_part_alone_is_named(name):
    with pytest.raises(ValueError, match=r"expected a schema that text can be held to"):
        check_schema(LOOSE[name][0])


@pytest.mark.parametrize("place", INSIDE)
def test_it_is_found_wherever_it_stands(place):
    with pytest.raises(ValueError, match=r"got not at (?!#$)"):
        check_schema(INSIDE[place]({"not": TEXT}))


@pytest.mark.parametrize("name", HELD)
def test_what_is_held_is_not_refused(name):
    check_schema(HELD[name])
    check_schema(record(a=HELD["bounds"]))


@pytest.mark.parametrize("pointer", ["#/$defs/no", "#/anyOf/7", "#/anyOf/x", "#x", "", 5, None])
def test_references_to_nothing_are_refused(pointer):
    with pytest.raises(ValueError, match=r"\$ref to"):
        check_schema({"anyOf": [{"$ref": pointer}]})


def test_deep_and_circular_schemas_take_no_depth():
    deep = {"not": {}}
    for _ in range(5000):
        deep = {"type": "array", "items": deep}
    with pytest.raises(ValueError, match="got not at"):
        check_schema(deep)
    circular = {"$defs": {n: {"oneOf": [{"$ref": f"#/$defs/{m}"}]} for n, m in ("ab", "ba")}}
    check_schema(circular | {"$ref": "#/$defs/a"})
    check_schema({"$ref": "#"})


def accepts(schema, text):
    pytest.importorskip("xgrammar", reason="make test-structured")
    from xgrammar import Grammar
    from xgrammar.testing import _is_grammar_accept_string

    grammar = Grammar.from_json_schema(json.dumps(schema), any_whitespace=False)
    return _is_grammar_accept_string(grammar, text)


@pytest.mark.parametrize("name", LOOSE)
def test_the_library_lets_pass_what_is_refused(name):
    """Where a release does not, the table is to be shortened."""
    assert accepts(*LOOSE[name])


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("recursion", '{"value": 1, "next": {"value": 2}}', '{"next": null}'),
        ("values of a type", "3", "2"),
        ("false", "false", "true"),
        ("oneOf of tags", '{"kind": "b", "value": 1}', '{"kind": "c"}'),
        ("oneOf of references", '{"kind": "a"}', "{}"),
        ("bounds", '{"a": 9, "e": 10}', '{"a": 10}'),
        ("types by their keywords", '{"a": [1]}', "{}"),
        ("names", '{"a": 1}', '{"A": 1}'),
    ],
)
def test_the_library_holds_what_is_not_refused(name, good, bad):
    assert accepts(HELD[name], good)
    assert not accepts(HELD[name], bad)
