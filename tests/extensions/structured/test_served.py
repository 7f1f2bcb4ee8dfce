"""Requests to the server whose answers are held to a schema or to a call."""

import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import transformers
from packaging.version import Version

pytest.importorskip("xgrammar", reason="make test-structured")
if Version(transformers.__version__) < Version("5.20"):
    pytest.skip("the server needs transformers 5.20", allow_module_level=True)

from hf_retrieval_assist.extensions.serving import grammars
from tests.support.memories import wait_until
from tests.support.served import ANSWERS, TEMPLATE, TOOL, changed_model, learned, serving

SIZE = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}, "fits": {"type": "boolean"}},
    "required": ["size", "fits"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "size", "schema": SIZE, "strict": True}}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Ghent", "Delft"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TIME = {"type": "function", "function": {"name": "time", "parameters": CITY}}
RAIN = {"type": "function", "function": {**TOOL["function"], "parameters": CITY}}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serving(learned(tmp_path_factory.mktemp("model"))) as found:
        yield found


def is_sized(text):
    found = json.loads(text)
    return found["size"] in ("small", "large") and isinstance(found["fits"], bool)


@pytest.mark.parametrize("options", [{}, {"temperature": 2, "extra_body": {"seed": 3}}, {"n": 2}])
def test_answers_keep_to_a_schema(served, options):
    for answer in (
        served.ask("hello", response_format=FORMAT, **options),
        served.ask("list", response_format=FORMAT, logprobs=True, top_logprobs=1, **options),
    ):
        for choice in answer.choices:
            assert is_sized(choice.message.content)
            assert choice.finish_reason == "stop"
    if "n" not in options:
        assert is_sized(served.stream("hello", response_format=FORMAT, **options)[0])
    assert served.ask("hello").choices[0].message.content == ANSWERS["hello"]


def test_responses_keep_to_a_schema(served):
    text = {"format": {"type": "json_schema", "name": "size", "schema": SIZE}}
    options = {"model": served.model, "input": "hello", "text": text}
    assert is_sized(served.client.responses.create(**options).output_text)
    *_, last = served.client.responses.create(**options, stream=True)
    assert is_sized(last.response.output_text)


def test_answers_are_json(served):
    options = {"response_format": {"type": "json_object"}, "max_tokens": 300}
    for seed in range(5):
        (choice,) = served.ask("hello", temperature=2, seed=seed, **options).choices
        assert choice.message.content.startswith("{")
        if choice.finish_reason != "length":
            assert isinstance(json.loads(choice.message.content), dict)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tools", [[RAIN], [TIME, RAIN]])
@pytest.mark.parametrize("choice", ["required", "weather"])
def test_calls_are_required(served, choice, tools, stream):
    named = {"type": "function", "function": {"name": choice}}
    options = {"tools": tools, "tool_choice": choice if choice == "required" else named}
    if stream:
        text, chunks = served.stream("hello", **options)
        assert not text
        calls = [one.choices[0].delta.tool_calls for one in chunks]
        ((call,),) = [one for one in calls if one]
        reason = chunks[-1].choices[0].finish_reason
    else:
        message = served.ask("hello", **options).choices[0]
        assert not message.message.content
        (call,) = message.message.tool_calls
        reason = message.finish_reason
    assert reason == "tool_calls"
    assert call.function.name in ({"weather"} if choice == "weather" else {"time", "weather"})
    assert json.loads(call.function.arguments)["city"] in ("Ghent", "Delft")


def test_responses_call_what_is_named(served):
    flat = {"type": "function", **RAIN["function"]}
    options = {"model": served.model, "input": "hello", "tools": [flat]}
    options["tool_choice"] = {"type": "function", "name": "weather"}
    (call,) = served.client.responses.create(**options).output
    assert json.loads(call.arguments)["city"] in ("Ghent", "Delft")


def test_no_tool_is_called_where_none_may_be(served):
    found = served.ask("rain?", tools=[RAIN], tool_choice="none").choices[0]
    assert found == served.ask("rain?").choices[0]


def schema(value):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}


NOT = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
REMOTE = {"$ref": "https://example.com/number.json"}
STRICT = {"type": "function", "function": {"name": "f", "strict": True, "parameters": NOT}}
REFUSED = [
    ({"tool_choice": "required"}, "tool_choice", "got no tools"),
    (
        {"tools": [RAIN], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice",
        "got no tool of the name 'x'",
    ),
    ({"response_format": schema({"type": "no"})}, "response_format", "no"),
    ({"response_format": schema(NOT)}, "response_format", "got not at properties.a"),
    ({"response_format": schema(REMOTE)}, "response_format", r"got a \$ref to 'https"),
    (
        {"response_format": schema({"type": "string", "pattern": r"\bword\b"})},
        "response_format",
        "Word boundary is not supported",
    ),
    ({"response_format": schema({"enum": ["x" * 66_000]})}, "response_format", "at most 65,536"),
    ({"tools": [STRICT]}, "tools", "f: expected a schema .* got not at properties.a"),
    (
        {"tools": [STRICT | {"function": STRICT["function"] | {"strict": False}}] * 1900},
        "tools",
        "at most 128",
    ),
]


@pytest.mark.parametrize(("options", "param", "message"), REFUSED)
def test_what_nothing_can_be_held_to_is_refused(served, options, param, message):
    with pytest.raises(openai.BadRequestError, match=message) as found:
        served.ask("hello", **options)
    assert found.value.param == param


def test_responses_refuse_what_nothing_can_be_held_to(served):
    text = {"format": {"type": "json_schema", "name": "x", "schema": REMOTE}}
    with pytest.raises(openai.BadRequestError) as found:
        served.client.responses.create(model=served.model, input="hello", text=text)
    assert found.value.param == "text"


def test_a_schema_that_takes_long_is_refused_and_holds_nobody(served, monkeypatch):
    """Six seconds of a processor's. Others are answered meanwhile, and afterwards schemas are
    compiled again."""
    served.ask("hello", response_format=FORMAT)
    monkeypatch.setattr(grammars, "SECONDS", 1.0)
    slow = {"type": "integer"}
    for _ in range(450):
        slow = {"type": "array", "items": slow}
    with ThreadPoolExecutor(1) as clients:
        going = clients.submit(served.ask, "hello", response_format=schema(slow))
        wait_until(lambda: served.service.health["waiting"])
        assert served.ask("hello").choices[0].message.content == ANSWERS["hello"]
        assert not going.done()
        with pytest.raises(openai.BadRequestError, match="compiled within 1 s") as found:
            going.result()
    assert found.value.param == "response_format"
    monkeypatch.undo()
    another = schema(SIZE | {"description": "not compiled before"})
    assert is_sized(served.ask("hello", response_format=another).choices[0].message.content)


def test_a_schema_is_compiled_once_and_forgotten_with_a_tenant(served, monkeypatch):
    compiled, inner = [], grammars._compiled
    monkeypatch.setattr(grammars, "_compiled", lambda *x: compiled.append(x) or inner(*x))
    mine = schema(SIZE | {"description": "mine"})
    for _ in range(2):
        served.ask("hello", response_format=mine, n=3)
    assert len(compiled) == 1
    served.service._held.forget()
    served.ask("hello", response_format=mine)
    assert len(compiled) == 2


def test_calls_need_no_end_of_their_own(served, tmp_path):
    """Some templates write a name and arguments, and then end the answer."""
    start = TEMPLATE.index("<tool_call>")
    end = TEMPLATE.index("{% endfor %}", start)
    written = "<function={{ c.function.name }}>{{ c.function.arguments|tojson }}"
    template = TEMPLATE[:start] + written + TEMPLATE[end:]
    with serving(changed_model(served.model, tmp_path / "model", template)) as other:
        found = other.ask("hello", tools=[RAIN, TIME], tool_choice="required").choices[0]
        (call,) = found.message.tool_calls
        assert json.loads(call.function.arguments)["city"] in ("Ghent", "Delft")
        text = other.ask("hello", tools=[RAIN], tool_choice="required", logprobs=True)
        shown = "".join(one.token for one in text.choices[0].logprobs.content)
        assert shown.startswith("<function=weather>{")


def test_templates_that_write_calls_otherwise_are_named(served, tmp_path):
    model = changed_model(served.model, tmp_path / "model", TEMPLATE.replace("|tojson", "|string"))
    told = pytest.raises(openai.BadRequestError, match="no arguments in JSON behind a name")
    with serving(model) as other, told:
        other.ask("hello", tools=[RAIN], tool_choice="required")


def test_what_a_schema_forces_is_drafted(served):
    served.ask("hello", response_format=FORMAT)
    last = served.assistant.stats.last
    assert last.accepted > last.tokens // 2
