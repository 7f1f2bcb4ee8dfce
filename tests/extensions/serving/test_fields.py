"""What the fields of requests mean: how tokens are chosen, whose faults are told, which histories
are read."""

import http.client
import json
import threading
from contextlib import asynccontextmanager
from functools import partial
from urllib.parse import urlsplit

import pytest
from fastapi import FastAPI
from pydantic import ValidationError
from transformers import ContinuousBatchingConfig, Qwen2ForCausalLM, set_seed

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.extensions.serving import service
from hf_retrieval_assist.extensions.serving.answers import ChatAnswer
from hf_retrieval_assist.extensions.serving.app import build_app
from hf_retrieval_assist.extensions.serving.fields import (
    ChatFields,
    CompletionFields,
    ResponseFields,
)
from hf_retrieval_assist.extensions.serving.prompts import _called
from hf_retrieval_assist.extensions.serving.refusals import RefusedError, of_faults
from hf_retrieval_assist.extensions.serving.service import Service
from hf_retrieval_assist.extensions.serving.workers import OneByOne
from hf_retrieval_assist.extensions.serving.written import Written
from tests.support.memories import wait_until
from tests.support.served import (
    ANSWERS,
    ASKED,
    BODIES,
    CALL,
    TOOL,
    changed_model,
    get,
    listening,
    posted,
    serving,
    text_of,
    tokenizer_of_bytes,
)

KINDS = {
    "chat/completions": ChatFields,
    "completions": CompletionFields,
    "responses": ResponseFields,
}
BLOCKS = ContinuousBatchingConfig(page_size=16, num_blocks=64, max_batch_tokens=64)


# What requests ask for, and the arguments of `generate` that mean the same.
GREEDY, DRAWN = {"do_sample": False}, {"do_sample": True}
MEANINGS = [
    ({"top_p": 0.9}, DRAWN | {"top_p": 0.9}),
    ({"top_k": 3}, DRAWN | {"top_k": 3}),
    ({"min_p": 0.05}, DRAWN | {"min_p": 0.05}),
    ({"temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.1}, GREEDY),
    ({"repetition_penalty": 1.7}, GREEDY | {"repetition_penalty": 1.7}),
    ({"min_tokens": 33}, GREEDY | {"min_new_tokens": 33}),
]
MORE = [
    ({"temperature": 2.5, "top_k": -1}, DRAWN | {"temperature": 2.5, "top_k": 0}),
    ({"temperature": 2.5, "top_k": 9, "min_p": 0}, DRAWN | {"temperature": 2.5, "top_k": 9}),
    ({"top_k": -1, "min_p": 0, "top_p": 1, "repetition_penalty": 1}, GREEDY),
    ({"ignore_eos": True}, GREEDY | {"eos_token_id": 999}),
    ({"ignore_eos": True, "min_tokens": 40}, GREEDY | {"eos_token_id": 999}),
]
CASES = [*MEANINGS, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]


@pytest.mark.parametrize(("asked", "plain"), CASES, ids=[str(one) for one, _ in MEANINGS + MORE])
def test_how_tokens_are_chosen(alone, folder, asked, plain):
    """As `generate` chooses them behind the same seed; a field that says what is drawn from draws,
    as `top_p` does."""
    model = Qwen2ForCausalLM.from_pretrained(folder)
    tokenizer = tokenizer_of_bytes()
    inputs = tokenizer(BODIES["completions"]["prompt"], return_tensors="pt")
    found = {}
    for seed in (7, 8):
        status, answer = posted(alone, "completions", max_tokens=40, seed=seed, **asked)
        assert status == 200, answer
        set_seed(seed)
        ids = model.generate(**inputs, max_new_tokens=40, **plain)[0, inputs.input_ids.shape[1] :]
        found[text_of(answer)] = tokenizer.decode(ids, skip_special_tokens=True)
        assert answer["usage"]["completion_tokens"] == len(ids)
    assert [*found] == [*found.values()]
    assert len(found) == (2 if plain["do_sample"] else 1)


@pytest.mark.parametrize("route", BODIES)
def test_every_route_draws_behind_a_seed_and_goes_on_behind_its_end(served, route):
    """Of which no text is shown, and behind which the length ends it."""
    most = {"max_output_tokens" if route == "responses" else "max_tokens": 40}
    if isinstance(served.service.worker, OneByOne):
        drawn = most | {"temperature": 2.5, "seed": 7}
        asked = (drawn, drawn, drawn | {"seed": 8}, most | {"temperature": 0})
        first, again, other, greedy = (text_of(posted(served, route, **one)[1]) for one in asked)
        assert first == again
        assert len({first, other, greedy}) == 3
    for stream in (False, True):
        body = BODIES[route] | {"ignore_eos": True, "temperature": 0, "stream": stream} | most
        _, text = get(f"{served.url}/v1/{route}", body)
        assert "<|im_end|>" not in text
        assert ("incomplete" if route == "responses" else '"length"') in text
        assert '_tokens": 40' in text or '_tokens":40' in text


@pytest.mark.parametrize(
    ("least", "text"), [(0, "hello"), (5, "hello"), (6, "hello, and hello again"), (9, None)]
)
def test_texts_are_not_stopped_before_their_least_tokens(alone, least, text):
    body = {"temperature": 0, "stop": [", a", " again!"], "min_tokens": least, "max_tokens": 23}
    status, answer = posted(alone, **body)
    assert status == 200
    assert text_of(answer) == (ANSWERS["hello"] if text is None else text)
    # The last one ends with its last token.
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_the_least_is_no_more_than_the_most(alone, monkeypatch):
    """And an answer whose length nobody bounds gets as long."""
    for body in ({"max_tokens": 5, "min_tokens": 6}, {"min_tokens": 10**6}):
        status, answer = posted(alone, "completions", **body)
        assert (status, answer["error"]["param"]) == (400, "min_tokens")
    monkeypatch.setattr(service, "_DEFAULT", 8)
    status, answer = posted(alone, "completions", min_tokens=12, temperature=0)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 12)


@pytest.mark.parametrize(
    ("route", "held"),
    [
        ("chat/completions", {"response_format": {"type": "json_object"}}),
        ("chat/completions", {"tools": [TOOL], "tool_choice": "required"}),
        ("responses", {"text": {"format": {"type": "json_object"}}}),
    ],
)
def test_what_ends_an_answer_is_not_ignored_silently(alone, route, held):
    for field in ({"min_tokens": 3}, {"ignore_eos": True}):
        status, answer = posted(alone, route, **held, **field)
        assert (status, answer["error"]["param"]) == (400, *field)


# What answers that are decoded together cannot have each for itself.
ALONE = {"logit_bias": {"40": 100}, "frequency_penalty": 1, "presence_penalty": 1, "seed": 0}
ALONE |= {"logprobs": True, "repetition_penalty": 1.2, "min_tokens": 3, "temperature": 0.5}
ALONE |= {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "response_format": {"type": "json_object"}}


def test_what_all_share_side_by_side_is_the_models_own(folder, tmp_path):
    """What asks for the same as the configuration is served, said or left out there."""
    draws = changed_model(folder, tmp_path / "draws", do_sample=True, top_k=4)
    with serving(draws, batching=True) as served:
        same = {"temperature": 1, "top_p": 1, "top_k": 4, "min_p": 0, "repetition_penalty": 1}
        status, answer = posted(served, **same)
        assert status == 200, answer
        asked = [*ALONE.items(), ("temperature", 0), ("top_k", -1), ("tool_choice", "required")]
        for field, value in asked:
            status, answer = posted(served, **{field: value})
            told = status, answer["error"]["param"], answer["error"]["code"]
            assert told == (400, field, "unsupported_parameter")
            assert "--continuous-batching" in answer["error"]["message"]
    with serving(folder, batching=True) as served:  # nothing is drawn
        assert posted(served, temperature=0, seed=7)[0] == 200
        status, answer = posted(served, "completions", logprobs=0)
        assert (status, answer["error"]["param"]) == (400, "logprobs")


@pytest.mark.parametrize(
    "own",
    [
        {"num_beams": 2},
        {"cache_implementation": "static", "repetition_penalty": 1.7},
        {"num_return_sequences": 2, "do_sample": True},
        pytest.param({"pad_token_id": None, "min_new_tokens": 30}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_models_own_settings_are_those_of_answers(folder, tmp_path, own):
    """Other ways of decoding, too, beside which predictions are told; a request has its say."""
    path = changed_model(folder, tmp_path / "model", **own)
    model, tokenizer = Qwen2ForCausalLM.from_pretrained(path), tokenizer_of_bytes()
    prompt = BODIES["completions"]["prompt"]
    inputs = tokenizer(prompt, return_tensors="pt")
    set_seed(5)
    ids = model.generate(**inputs, max_new_tokens=40, num_return_sequences=1)
    plain = tokenizer.decode(ids[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    prediction = {"type": "content", "content": "hello"}
    with serving(path) as served:
        body = {"max_tokens": 40, "seed": 5, "prediction": prediction}
        status, answer = posted(served, "completions", echo=True, logprobs=0, **body)
        assert (status, text_of(answer)) == (200, prompt + plain)
        assert answer["usage"]["completion_tokens_details"]
        neutral = {"repetition_penalty": 1, "min_tokens": 0, "temperature": 0, "ignore_eos": True}
        status, answer = posted(served, "completions", max_tokens=40, **neutral)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 40)


WRONG = {"integer": ("3", True, 1.5, [3]), "number": ("0.5", True), "boolean": (1, 0, "true")}


@pytest.mark.parametrize("route", BODIES)
def test_numbers_and_switches_are_no_texts(route):
    """Nor is one of them the other, in any field; JSON does not tell 8 from 8.0."""
    kind, good = KINDS[route], BODIES[route]
    fields = kind.model_json_schema()["properties"]
    tried = 0
    for name, field in fields.items():
        kinds = {one.get("type") for one in field.get("anyOf", [field])}
        for which in kinds & WRONG.keys():
            for value in WRONG[which]:
                with pytest.raises(ValidationError) as found:
                    kind.model_validate(good | {"logprobs": True, name: value})
                faults = [one for one in found.value.errors() if one["loc"][0] == name]
                told = of_faults([one | {"loc": ("body", *one["loc"])} for one in faults])
                assert (told.param, told.code) == (name, "invalid_type")
                tried += 1
            if which == "integer" and name != "top_logprobs":
                kind.model_validate(good | {name: 2.0})
    assert tried > 20


def calling(arguments):
    """A conversation in which a tool was called."""
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "c", "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": "c", "content": "sun"}
    return [*ASKED, {"role": "assistant", "tool_calls": [call]}, result]


def test_calls_without_arguments_are_read(served):
    plain = text_of(posted(served, messages=calling("{}"))[1])
    for nothing in ("", " ", "null", None):
        status, answer = posted(served, messages=calling(nothing))
        assert (status, text_of(answer)) == (200, plain)
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": ""}
    back = {"type": "function_call_output", "call_id": "c", "output": "sun"}
    status, answer = posted(served, "responses", input=[*ASKED, call, back])
    assert (status, text_of(answer)) == (200, plain)


def test_calls_that_cannot_be_read_are_named(alone):
    messages = calling("{}")
    expected = ": expected a function with a name and arguments"
    for bad, place in (
        ({"function": {"name": "f", "arguments": "{"}}, ".function.arguments: expected JSON"),
        ({"function": {"name": "f"}}, expected),
        (5, f"{expected}, got 5"),
    ):
        messages[1]["tool_calls"][1:] = [bad]
        status, answer = posted(alone, messages=messages)
        assert (status, answer["error"]["param"]) == (400, "messages")
        assert answer["error"]["message"].startswith(f"messages.1.tool_calls.1{place}")


def test_developers_are_systems_where_a_template_knows_none(served):
    system, developer = (
        posted(served, messages=[{"role": role, "content": "x"}, *ASKED])[1]["usage"]
        for role in ("system", "developer")
    )
    assert system == developer


def test_answers_come_back_as_clients_parse_them(served):
    """With what they add to an answer, and to its calls."""
    plain = {"role": "assistant", "content": '{"a": 1}'}
    added = {"parsed": {"a": 1}, "refusal": None, "audio": None, "function_call": None}
    added |= {"annotations": [{"type": "url_citation"}], "tool_calls": None, "id": "msg_1"}
    added |= {"provider_specific_fields": {"refusal": None}}
    first, second = (
        text_of(posted(served, messages=[*ASKED, message, *ASKED])[1])
        for message in (plain, plain | added)
    )
    assert first == second
    call = calling('{"city": "Ghent"}')[1]["tool_calls"][0]
    parsed = call["function"] | {"parsed_arguments": {"city": "Ghent"}}
    found = _called("x", "messages", call | {"index": 0, "function": parsed})
    assert found["function"] == call["function"] | {"arguments": {"city": "Ghent"}}
    assert "index" not in found


# Names that a template has, a request's effort, and what it means; None: it is refused.
EFFORTS = [
    ("", "none", ""),
    ("", "low", None),
    ("enable_thinking", "none", "False"),
    ("enable_thinking", "low", None),
    ("reasoning_effort", "none", "none"),
    ("thinking", "none", None),
]


@pytest.mark.parametrize(("name", "effort", "told"), EFFORTS)
def test_who_asks_for_no_reasoning_gets_none(alone, monkeypatch, name, effort, told):
    """Or is refused, by a model that could not do without."""
    tokenizer, prompts = alone.service.tokenizer, alone.service._prompts
    shown = f"{{{{ {name} }}}}" if name else ""
    monkeypatch.setattr(tokenizer, "chat_template", shown + tokenizer.chat_template)
    fields = ResponseFields(input="hello", reasoning={"effort": effort, "summary": "auto"})
    if told is None:
        with pytest.raises(RefusedError):
            prompts.of(fields)
    else:
        text = tokenizer.decode(prompts.of(fields)[0]["input_ids"][0])
        assert text.startswith(f"{told}<|im_start|>user")


UNSEEN = [{"type": "web_search"}, {"type": "namespace", "name": "x", "tools": []}]
# What changes no answer of each route.
UNNOTICED = {
    "chat/completions": [
        {"n": 1, "logprobs": False, "presence_penalty": 0, "tool_choice": "auto", "user": "x"},
        {"stop": None, "seed": None, "chat_template_kwargs": None, "stream_options": None},
        {"metadata": {"a": "b"}, "store": True, "service_tier": "auto", "modalities": None},
        {"response_format": {"type": "text"}, "parallel_tool_calls": True, "ignore_eos": False},
        {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "min_tokens": 0},
        {"top_k": -1, "max_tokens": 200.0},
        {"verbosity": "low", "reasoning_effort": "none", "top_logprobs": 0},
        {"stream_options": {"include_usage": True}, "client_metadata": {"a": 1}},
        {"tools": UNSEEN},
    ],
    "completions": [
        {"stream_options": {"include_usage": True}, "user": "x"},
        {"suffix": ""},
        {"suffix": None},
    ],
    "responses": [
        {"include": ["reasoning.encrypted_content"], "truncation": "auto", "tools": UNSEEN},
        {"reasoning": {"summary": "auto", "effort": "none"}, "text": {"verbosity": "high"}},
        {"top_logprobs": 0, "client_metadata": {"a": 1}, "include": []},
    ],
}


@pytest.mark.parametrize("route", BODIES)
def test_what_changes_no_answer_is_taken(served, route):
    plain = text_of(posted(served, route, temperature=0)[1])
    for body in UNNOTICED[route]:
        status, answer = posted(served, route, temperature=0, **body)
        assert status == 200, answer
        assert text_of(answer) == plain


def test_tools_that_no_model_sees_are_spoken_of_once(alone, told):
    kind = {"type": "web_search"}
    for _ in range(2):
        posted(alone, "responses", tools=[kind, TOOL], max_output_tokens=1)
    assert sum(kind["type"] in one.message for one in told.records) == 1
    status, answer = posted(alone, "responses", tools=[kind], tool_choice="required")
    assert (status, answer["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize("parallel", [False, True])
def test_a_client_may_ask_for_one_call_alone(alone, monkeypatch, parallel):
    """Of two that the model writes."""
    put, ids = Written.put, tokenizer_of_bytes()(f"{CALL}\n{CALL}").input_ids
    monkeypatch.setattr(Written, "put", lambda written, *_: put(written, ids))
    _, answer = posted(alone, tools=[TOOL], parallel_tool_calls=parallel, max_tokens=1)
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1 + parallel


# Where a fault may be.
FAULTS = [(Service, "_configured"), (Qwen2ForCausalLM, "forward"), (ChatAnswer, "body")]


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_of_a_fault_is_told(alone, monkeypatch, stream):
    """A stream that has begun tells of it in its last event; and the connection outlives it."""
    where = urlsplit(alone.url)
    connection = http.client.HTTPConnection(where.hostname, where.port)
    connection.auto_open = 0
    connection.connect()

    def fail(*_, **__):
        raise TypeError("the disk at /secret")

    for owner, name in [*FAULTS, (ChatAnswer, "begin"), (ChatAnswer, "go_on")]:
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, fail)
            body = json.dumps({"messages": ASKED, "max_tokens": 4, "stream": stream})
            kind = {"content-type": "application/json"}
            connection.request("POST", "/v1/chat/completions", body, kind)
            response = connection.getresponse()
            text = response.read().decode()
        if name in (("body",) if stream else ("begin", "go_on")):
            assert response.status == 200
            continue
        assert response.status == (200 if stream and owner is not Service else 500), name
        told = json.loads(text.strip().split("\n")[-1].removeprefix("data: "))
        assert told["error"]["message"] == "the answer could not be completed"
        assert "secret" not in text
    connection.close()


make = partial(build_app, device="cpu", dtype="float32")


@pytest.mark.parametrize("batching", [False, True])
def test_an_application_that_is_never_served_keeps_no_process(folder, batching):
    before = {*threading.enumerate()}
    app = make(folder, SamAssistant(), continuous_batching=batching, cb_config=BLOCKS)
    started = {*threading.enumerate()} - before
    assert started
    assert all(one.daemon for one in started)
    assert app.state.service.close()
    assert not {*threading.enumerate()} & started


def test_an_application_may_be_mounted_into_another(folder):
    """Whose lifespan alone runs: the first probe has the model tested."""
    inner = make(folder, SamAssistant())

    @asynccontextmanager
    async def lifespan(_):
        yield
        inner.state.service.close()

    outer = FastAPI(lifespan=lifespan)
    outer.mount("/llm", inner)
    with listening(outer) as url:
        body = {"messages": ASKED, "temperature": 0}
        status, text = get(f"{url}/llm/v1/chat/completions", body)
        assert (status, text_of(json.loads(text))) == (200, ANSWERS["hello"])
        wait_until(lambda: get(f"{url}/llm/ready")[0] == 200)
    assert not inner.state.service.worker.is_alive
