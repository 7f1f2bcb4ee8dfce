"""JSON of an expected schema, and expected tool calls: what they print is drafted, not forced."""

import functools
import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.simulation import simulate
from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.extensions.structured.form_text import FormText
from hf_retrieval_assist.extensions.structured.forms import Form, Forms, schema_forms, tool_forms
from hf_retrieval_assist.host.chat_templates import rendered_call
from hf_retrieval_assist.papers import SamDecoding
from tests.support.byte_model import byte_tokenizer
from tests.support.memories import remembering

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "colour": {"enum": ["red", "green"]},
        "version": {"const": 2},
        "member": {"type": ["boolean", "null"]},
    },
    "$defs": {
        "address": {"properties": {"street": {"type": "string"}, "floor": {"type": "integer"}}}
    },
}
PLACE = {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"name": name, "parameters": PLACE} for name in ("get_weather", "book_hotel")]
CALL = {"name": "book_hotel", "arguments": {"city": "Bergen", "days": 3}}
TEMPLATE = """{% for message in messages %}<{{ message.role }}>{{ message.content }}
{%- for call in message.tool_calls or [] %}WRITTEN{% endfor %}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
FORMATS = {
    "JSON": """<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>""",
    "tags": """<function={{ call.function.name }}>
{% for name, value in call.function.arguments | items %}<parameter={{ name }}>
{{ value }}
</parameter>
{% endfor %}</function>""",
}
VALUE = {
    "name": "Ann",
    "address": {"street": "Elm", "floor": 3},
    "colour": "green",
    "version": 2,
    "member": True,
}


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def spacing_tokenizer():
    """Letters, with a space in front of every text, which decoding drops again."""
    letters = '▁abdefgmnortu{}":,\n'
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    inner.decoder = decoders.Metaspace(prepend_scheme="always")
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def encoded(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids


def drafts_behind(forms, text, budget=64, vocab_size=256):
    """The texts of the paths that are drafted."""
    ids = encoded(forms._tokenizer, text)
    # What the prompt ends with counts as well.
    session = FormText(forms, np.array(ids[:2], np.int32), vocab_size)
    session.append(ids[2:])
    tree = session.draft(budget)
    assert tree.fault(1 << 30, 1 << 30) is None
    assert tree.fault(vocab_size, 36) is None
    leaves = set(range(len(tree))) - set(tree.parents.tolist())
    return {forms._tokenizer.decode(tree.token_ids[tree.path(leaf)]) for leaf in leaves}


def test_a_schema_is_printed_in_the_usual_layouts():
    """Also one of pydantic's."""
    plain, compact, indented, more = schema_forms(SCHEMA)
    assert plain.parts == (
        '{"name": "',
        '", "address": {"street": "',
        '", "floor": ',
        '}, "colour": "',
        '", "version": 2, "member": ',
        "}",
    )
    assert plain.choices == ((), (), (), ("red", "green"), ("true", "false"), ())
    assert compact.parts[1] == '","address":{"street":"'
    assert indented.parts[1] == '",\n  "address": {\n    "street": "'
    assert more.parts[0] == '{\n    "name": "'
    pydantic = pytest.importorskip("pydantic")
    inner = pydantic.create_model("Inner", street=(str, ...))
    model = pydantic.create_model("Outer", inner=(inner, ...), size=(int | None, None))
    assert schema_forms(model)[0].parts == ('{"inner": {"street": "', '"}, "size": ', "}")


def test_what_is_printed_is_drafted_and_choices_are(tokenizer):
    forms = Forms(schema_forms(SCHEMA)[:1], tokenizer)
    assert drafts_behind(forms, "Here it is:") == set()
    assert drafts_behind(forms, 'Here: {"na') == {'me": "'}
    begun = '{"name": "Ann'
    # The text may go on, or the part that is due may come.
    assert drafts_behind(forms, begun) == {'", "address": {"street": "'}
    assert drafts_behind(forms, begun + '"') == {', "address": {"street": "'} | {
        ', "floor": ',
        ', "version": 2, "member": ',
    }
    coloured = begun + '", "address": {"street": "Elm", "floor": 3}, "colour": "'
    assert drafts_behind(forms, coloured) == {
        f'{colour}", "version": 2, "member": ' for colour in ("red", "green")
    }
    assert drafts_behind(forms, coloured + "gre") == {'en", "version": 2, "member": '}
    assert drafts_behind(forms, coloured + "green") == {'", "version": 2, "member": '}
    assert drafts_behind(forms, coloured + 'red", "version": 2, "member": tr') == {"ue}"}


def test_parts_may_be_left_out_and_a_form_may_be_left(tokenizer):
    forms = Forms(schema_forms(SCHEMA)[:1], tokenizer)
    without_address = '{"name": "Ann", "version": 2, "member": '
    assert drafts_behind(forms, without_address) == {"true}", "false}"}
    assert drafts_behind(forms, '{"name": "Ann"} and that is all. ') == {
        '", "address": {"street": "'
    }
    # The next one begins anew.
    assert drafts_behind(forms, '{"name": "Ann"}\n{"na') >= {'me": "'}


def test_drafts_are_whole_characters_within_the_budget_and_the_vocabulary(tokenizer):
    schema = {"properties": {"größe": {"enum": ["weiß", "grün"]}, "名": {"type": "integer"}}}
    forms = Forms(schema_forms(schema)[:1], tokenizer)
    assert drafts_behind(forms, '{"grö') == {'ße": "'}
    assert drafts_behind(forms, '{"größe": "wei') == {'ß", "名": '}
    forms = Forms([Form(('{"z": "', '", "a": 1}'), ((), ()))], tokenizer)
    (z,) = encoded(tokenizer, "z")
    assert drafts_behind(forms, "{", budget=3) == {'"z"'}
    assert drafts_behind(forms, "{", vocab_size=z) == {'"'}


def test_a_space_that_the_tokenizer_puts_in_front_is_not_drafted(spacing_tokenizer):
    forms = Forms([Form(('{"name":"', '"}'), ((), ()))], spacing_tokenizer)
    tokens = spacing_tokenizer.convert_ids_to_tokens(forms.ids_of('name":"'))
    assert tokens == list('name":"')
    assert forms.text_of(tuple(encoded(spacing_tokenizer, "a b"))) == " a b"
    assert drafts_behind(forms, 'a\n{"na', vocab_size=19) == {'me":"'}


@pytest.mark.parametrize("layout", [{}, {"separators": (",", ":")}, {"indent": 2}, {"indent": 4}])
@pytest.mark.parametrize("preset", [SamAssistant, remembering])
def test_fewer_forwards_for_json_of_an_expected_schema(tokenizer, preset, layout):
    output = encoded(tokenizer, "Sure:\n" + json.dumps(VALUE, **layout))
    request = (encoded(tokenizer, "A customer as JSON."), output)
    without = simulate(preset(budget=16), [request]).steps
    assistant = preset(budget=16).expecting(schema=SCHEMA, tokenizer=tokenizer)
    assert simulate(assistant, [request]).steps < without / 2


@pytest.mark.parametrize("written", FORMATS)
def test_fewer_forwards_for_a_first_call_of_a_tool(tokenizer, written):
    tokenizer.chat_template = TEMPLATE.replace("WRITTEN", FORMATS[written])
    described = [{"type": "function", "function": tool} for tool in TOOLS]
    output = encoded(tokenizer, rendered_call(tokenizer, described, CALL, 9 * "0"))
    request = (encoded(tokenizer, "<user>Three days in Bergen?\n<assistant>"), output)
    without = simulate(SamAssistant(budget=16), [request]).steps
    assistant = SamAssistant(budget=16).expecting(tools=TOOLS, tokenizer=tokenizer)
    assert len(assistant.expected.forms.forms) == len(TOOLS)
    assert simulate(assistant, [request]).steps < 0.5 * without


def test_a_function_is_a_tool(tokenizer):
    def double(number: int):
        """Twice a number.

        Args:
            number: which one.
        """

    tokenizer.chat_template = TEMPLATE.replace("WRITTEN", FORMATS["JSON"])
    (form,) = tool_forms([double], tokenizer)
    assert form.parts[0] == '<tool_call>\n{"name": "double", "arguments": {"number": '
    (bare,) = tool_forms([{"name": "double", "parameters": {}}], tokenizer)
    assert bare.parts == ('<tool_call>\n{"name": "double", "arguments": {}}\n</tool_call>',)


DOUBLING = {
    f"d{n}": {"properties": {key: {"$ref": f"#/$defs/d{n + 1}"} for key in "ab"}} for n in range(40)
}
DEEP = functools.reduce(lambda inner, _: {"properties": {"a": inner}}, range(5000), {})
HOSTILE = {
    "empty": {},
    "recursive": {"properties": {"name": {"type": "string"}, "child": {"$ref": "#"}}},
    "circular": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "doubling": {"$ref": "#/$defs/d0", "$defs": DOUBLING},
    "deep": DEEP,
    "enormous": {"properties": {f"key_{n}": {"type": "string"} for n in range(100_000)}},
    "many choices": {"properties": {"a": {"enum": list(map(str, range(100_000)))}}},
    "contradictory": {"type": "object", "allOf": [{"type": "string"}, {"type": "integer"}]},
    "nonsense": {"properties": ["a"], "enum": 3, "anyOf": {}, "$ref": ["#"], "type": {}},
    "no such reference": {"properties": {"a": {"$ref": "#/$defs/none"}}},
    "marks": {"properties": {"\ue123": {"const": 7_000_000_012_345}, "b": {"const": "\uf000"}}},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_schemas(tokenizer, kind):
    output = '{"name": "a", "child": {"name": "b"}} {"a": 3, "b": {"a": 4}} {"key_0": "x"}'
    request = [encoded(tokenizer, text) for text in ("Go on. ", output)]
    assistant = SamAssistant(budget=16).expecting(schema=HOSTILE[kind], tokenizer=tokenizer)
    assert sum(len(form.parts) for form in assistant.expected.forms.forms) < 10_000
    found = simulate(assistant, [request])
    assert found.tokens == len(output) - 1
    assert found.steps <= simulate(SamAssistant(budget=16), [request]).steps


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"schema": SCHEMA}, TypeError, "expected a tokenizer with schema or tools, got None"),
        ({"tools": TOOLS}, TypeError, "expected a tokenizer with schema or tools, got None"),
        *(({"schema": s}, TypeError, "schema: expected a JSON schema") for s in ("{}", [{}], True)),
        ({"tools": TOOLS}, ValueError, "expected a chat template that writes tool calls"),
        ({"tools": [{"parameters": {}}]}, ValueError, "expected each to have a name"),
        ({"tools": [3]}, TypeError, "tools: expected functions or JSON schemas, got int"),
    ],
)
def test_what_is_refused(tokenizer, given, error, message):
    tokenizer.chat_template = "{{ messages[0].content }}"
    with_it = {} if "got None" in message else {"tokenizer": tokenizer}
    with pytest.raises(error, match=message):
        SamAssistant().expecting(**given, **with_it)
    with pytest.raises(ValueError, match=r"SamDecoding\(.*\) drafts from no schema or tools"):
        SamDecoding().expecting(schema=SCHEMA, tokenizer=tokenizer)
