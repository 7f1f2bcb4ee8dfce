"""The server, driven by the API's own client: plain answers, predictions, bad requests, figures."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import urllib.error
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    Qwen2ForCausalLM,
    __version__,
)
from transformers.cli.serve import Serve

from hf_retrieval_assist import OutputMemory, Prefixes, SamAssistant
from hf_retrieval_assist.extensions.serving import workers
from hf_retrieval_assist.extensions.serving.fields import (
    ChatFields,
    CompletionFields,
    ResponseFields,
)
from hf_retrieval_assist.extensions.serving.written import Failed, Form, Written
from hf_retrieval_assist.tools.cli import main
from tests.support.memories import wait_until
from tests.support.redis_process import free_port
from tests.support.rounding import near
from tests.support.served import (
    ANSWERS,
    ASKED,
    BODIES,
    CALL,
    LIST,
    TOOL,
    Served,
    changed_model,
    connected,
    get,
    serving,
    tokenizer_of_bytes,
)


def healthy(url):
    with contextlib.suppress(urllib.error.URLError):
        return get(f"{url}/health")[0] == 200


@pytest.fixture(scope="module")
def theirs(folder):
    """transformers' own server."""
    port = free_port()
    serve = Serve(folder, device="cpu", dtype="float32", port=port, non_blocking=True)
    url = f"http://localhost:{port}"
    wait_until(lambda: healthy(url))
    yield Served(url, None, folder)
    serve.kill_server()


def test_a_history_that_is_sent_again_is_read_once(folder):
    messages, before = [{"role": "user", "content": LIST}], 0
    with serving(folder, SamAssistant(prefixes=Prefixes())) as kept, serving(folder) as other:
        for turn in range(3):
            answer = kept.ask(messages, max_tokens=20)
            assert answer.choices == other.ask(messages, max_tokens=20).choices
            details = answer.usage.prompt_tokens_details
            assert (details is None) == (turn == 0)
            if details is not None:
                # What the answer's text is read as need not be what was written.
                assert answer.usage.prompt_tokens > details.cached_tokens >= before
            before = answer.usage.prompt_tokens
            text = answer.choices[0].message.content
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "on"}]
        assert kept.metrics()[("prompt_tokens_read_before_total",)] > before / 2


@pytest.mark.parametrize("asked", ["list", "hello", "something that it was never asked"])
def test_chats_are_answered_as_by_the_server_without_an_assistant(served, theirs, asked):
    """And texts completed; a client that goes away costs the others nothing."""
    plain, ours = theirs.ask(asked), served.ask(asked)
    assert ours.choices == plain.choices
    assert ours.usage == plain.usage
    text, chunks = served.stream(asked)
    assert text == theirs.stream(asked)[0]
    assert chunks[-1].choices[0].finish_reason == plain.choices[0].finish_reason
    assert chunks[-1].usage == plain.usage
    stream = served.ask(asked, stream=True)
    next(iter(stream))
    stream.close()
    assert served.ask(asked).choices == plain.choices
    options = {"prompt": f"<|im_start|>assistant\n1. {asked}", "max_tokens": 40, "temperature": 0}
    completed, found = (
        which.client.completions.create(model=served.model, **options) for which in (theirs, served)
    )
    assert found.choices == completed.choices


def test_tools_are_called(served, theirs):
    """And a predicted call counts as written."""
    plain, ours = (which.ask("rain?", tools=[TOOL]) for which in (theirs, served))
    assert [choice.finish_reason for choice in ours.choices] == ["tool_calls"]
    (call,) = ours.choices[0].message.tool_calls
    assert call.function == plain.choices[0].message.tool_calls[0].function
    assert json.loads(call.function.arguments) == {"city": "Ghent"}
    options = {"tools": [TOOL], "prediction": {"type": "content", "content": CALL}}
    _, chunks = served.stream("rain?", **options)
    streamed = [c.choices[0].delta.tool_calls for c in chunks if c.choices[0].delta.tool_calls]
    assert [call[0].function.name for call in streamed] == ["weather"]
    for answer in (served.ask("rain?", **options), chunks[-1]):
        told = answer.usage.completion_tokens_details
        assert (told.accepted_prediction_tokens, told.rejected_prediction_tokens) == (len(CALL), 0)


def test_predictions_are_drafted_and_told(served, theirs):
    changed = LIST.replace("3. item 0", "3. thing 9")
    prediction = {"type": "content", "content": changed}
    plain = theirs.ask("list")
    served.assistant.memory.forget()
    drafted = served.assistant.stats.total.accepted
    ours = served.ask("list", prediction=prediction)
    # Counted when a step comes after it.
    wait_until(lambda: served.assistant.stats.total.accepted > drafted)
    assert ours.choices == plain.choices
    prediction["content"] = [{"type": "text", "text": changed}]
    text, chunks = served.stream("list", prediction=prediction)
    assert text == plain.choices[0].message.content
    for usage in (ours.usage, chunks[-1].usage):
        told = usage.completion_tokens_details
        assert told.accepted_prediction_tokens + told.rejected_prediction_tokens == len(changed)
        assert 0 < told.rejected_prediction_tokens < len(changed) // 3
    assert served.ask("list").usage.completion_tokens_details is None


def of_user(content):
    return {"messages": [{"role": "user", "content": content}]}


def hello(served, **body):
    """What a chat's route answers: its status and text."""
    good = {"model": served.model, "temperature": 0, "max_tokens": 8, **of_user("hello")}
    return get(f"{served.url}/v1/chat/completions", good | body)


def answered(served, **body):
    """The answer of a chat's route that has served a request."""
    status, text = hello(served, **body)
    assert status == 200, text
    return json.loads(text)


SURROGATE = "half of \ud83d"
PARTS = [{"type": "text"}]
IMAGE = [{"type": "image_url", "image_url": {"url": "x"}}]
OF_NO_TEXT = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
CHAT, COMPLETION, RESPONSE = BODIES
# What fields may not be: the code of the refusal, and the values.
BAD = {
    (CHAT, "messages"): [
        ("invalid_value", [], [OF_NO_TEXT], of_user(5)["messages"], of_user(SURROGATE)["messages"]),
        ("invalid_value", [{"content": "x"}], [{"role": "nobody", "content": "x"}]),
        ("invalid_value", of_user(PARTS)["messages"], [{"role": "user", "colour": "red"}]),
        ("invalid_type", 5, [5]),
        ("unsupported_value", of_user(IMAGE)["messages"]),
        ("context_length_exceeded", of_user("x" * 40_000)["messages"]),
        ("missing_required_parameter", ...),
    ],
    (CHAT, "prediction"): [
        ("invalid_value", {"type": "content", "content": SURROGATE}),
        ("invalid_type", "text", {"type": "content", "content": 5}),
        ("missing_required_parameter", {"type": "content"}),
    ],
    (CHAT, "temperature"): [("invalid_value", -1, float("inf")), ("invalid_type", 10**400)],
    (CHAT, "max_tokens"): [("invalid_value", 0), ("context_length_exceeded", 10**30, 10**400)],
    (CHAT, "stop"): [("invalid_value", ["a", ""], "x" * 1001, ["x"] * 17), ("invalid_type", 5)],
    (CHAT, "chat_template_kwargs"): [("invalid_value", {"tokenize": False}, {"max_length": 9})],
    (CHAT, "logit_bias"): [
        ("invalid_value", {"x": 1}, {"-1": 1}, {"20": float("nan")}),
        ("invalid_value", {str(n): 1 for n in range(1025)}),
    ],
    (CHAT, "no_such_field"): [("unknown_parameter", 1)],
    (CHAT, "tools"): [
        ("invalid_value", [5], [{"type": "function", "function": 5}], [TOOL] * 129),
        ("invalid_type", 5),
        ("unsupported_value", [{"type": "custom"}]),
    ],
    (CHAT, "tool_choice"): [("invalid_value", "always", {"name": 5})],
    (CHAT, "response_format"): [("invalid_value", "json", {"type": "json_schema"})],
    (CHAT, "top_logprobs"): [("invalid_value", 5)],  # without logprobs
    (CHAT, "stream_options"): [("unknown_parameter", {"colour": 1})],
    (CHAT, "verbosity"): [("invalid_value", "lowest")],
    (CHAT, "modalities"): [("unsupported_value", ["audio"])],
    (CHAT, "audio"): [("unsupported_value", {})],
    (CHAT, "functions"): [("unsupported_value", [{"name": "f"}])],
    (CHAT, "reasoning_effort"): [("unsupported_parameter", "low")],
    (CHAT, "model"): [("model_not_found", "another")],
    (COMPLETION, "prompt"): [
        ("invalid_value", "", [], [""], ["a", 1], [-1], [[]], 5, SURROGATE, [10**6]),
        ("missing_required_parameter", ...),
        ("context_length_exceeded", "x" * 40_000, ["x", "x" * 40_000]),
    ],
    (COMPLETION, "max_tokens"): [("invalid_value", -1)],
    (COMPLETION, "best_of"): [("unsupported_value", 2)],
    (COMPLETION, "suffix"): [("unsupported_value", "x", 5)],
    (COMPLETION, "logprobs"): [("invalid_value", -1, 21), ("invalid_type", True)],
    (RESPONSE, "input"): [
        ("invalid_value", "", [], 5, SURROGATE, [{"role": "user", "content": 5}]),
        ("invalid_type", [5]),
        ("invalid_value", [{"type": "function_call"}], [*ASKED, {"type": "new"}]),
        ("missing_required_parameter", ...),
    ],
    (RESPONSE, "max_output_tokens"): [("invalid_value", 0)],
    (RESPONSE, "previous_response_id"): [("unsupported_value", "y")],
    (RESPONSE, "background"): [("unsupported_value", True)],
    (RESPONSE, "truncation"): [("invalid_value", "middle")],
    (RESPONSE, "include"): [("unsupported_value", ["usage"], 5)],
    (RESPONSE, "reasoning"): [
        ("unsupported_parameter", {"effort": "low"}),
        ("unknown_parameter", {"colour": "red"}),
    ],
    (RESPONSE, "text"): [("invalid_value", {"format": {"type": "xml"}})],
}
RANGES = {
    "max_completion_tokens": [-5],
    "top_p": [0, 1.5],
    "frequency_penalty": [-3],
    "presence_penalty": [3],
    "n": [0, 129],
    "seed": [2**64],
    "top_k": [-2, 2**31],
    "min_p": [-0.1, 1.5],
    "repetition_penalty": [0, -1, 1e9],
    "min_tokens": [-1],
}
BAD |= {(CHAT, field): [("invalid_value", *values)] for field, values in RANGES.items()}


def refused(served, route, field, code, body):
    status, text = get(f"{served.url}/v1/{route}", body)
    assert status == (404 if code == "model_not_found" else 400), text
    error = json.loads(text)["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", field), error
    assert error["code"] == code
    assert field in error["message"]
    return error


@pytest.mark.parametrize(("route", "field"), BAD, ids=str)
def test_bad_requests_are_told_what_is_wrong(served, route, field):
    for code, *values in BAD[route, field]:
        for number, bad in enumerate(values):
            body = BODIES[route] | {"stream": number % 2 > 0, field: bad}
            if bad is ...:
                del body[field]
            refused(served, route, field, code, body)


@pytest.mark.parametrize("raw", [b"{", b"NaN", b'"\\ud83d"', b"[]", b'{"a":' * 500, b"\xff", b""])
def test_what_is_no_object_is_refused(served, raw):
    """And no field is at fault."""
    for route in BODIES:
        status, text = get(f"{served.url}/v1/{route}", raw)
        error = json.loads(text)["error"]
        assert (status, error["param"]) == (400, None)
        assert error["message"]
    if raw == b"{":
        assert "at character 1" in error["message"]
    kind = {"content-type": "application/x-www-form-urlencoded"}
    status, text = get(f"{served.url}/v1/{route}", BODIES[route], **kind)
    assert status == 400
    assert "content-type: application/json" in json.loads(text)["error"]["message"]


def test_the_page_has_every_field():
    page = (Path(__file__).parents[3] / "docs" / "howto" / "server.md").read_text()
    table = page[page.index("| field |") : page.index("Everything else is refused")]
    named = re.findall(r"`(\w+)`", "".join(re.findall(r"^\|(.*?)\|", table, re.MULTILINE)))
    fields = ChatFields, CompletionFields, ResponseFields
    assert sorted(named) == sorted({name for kind in fields for name in kind.model_fields})


def test_what_is_not_there_is_told(served):
    for method, path, status in (
        ("GET", "/v1/nowhere", 404),
        ("GET", "/v1/chat/completions", 405),
        ("GET", "/v1/models/another", 404),
        ("DELETE", "/tenants/acme", 404),
    ):
        found, text = get(f"{served.url}{path}", method=method)
        assert (found, set(json.loads(text)["error"])) == (
            status,
            {"message", "type", "param", "code"},
        )
    assert [one.id for one in served.client.models.list()] == [served.model]


def test_texts_end_before_what_stops_them(served):
    """None of it is shown, in pieces neither."""
    for stop in ("1. item", ["never", " item 1"]):
        before = LIST[: LIST.index("1. item" if stop == "1. item" else " item 1")].strip()
        choice = served.ask("list", stop=stop).choices[0]
        assert (choice.message.content.strip(), choice.finish_reason) == (before, "stop")
        text, chunks = served.stream("list", stop=stop)
        assert (text.strip(), chunks[-1].choices[0].finish_reason) == (before, "stop")


def test_several_answers_and_prompts(served):
    """Each choice has its index, in streams too."""
    answer = served.ask("hello", n=3)
    assert [one.index for one in answer.choices] == [0, 1, 2]
    assert {one.message.content for one in answer.choices} == {ANSWERS["hello"]}
    assert answer.usage.prompt_tokens == served.ask("hello").usage.prompt_tokens
    text = [""] * 3
    for chunk in served.ask("hello", n=3, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            text[choice.index] += choice.delta.content or ""
    assert text == [ANSWERS["hello"]] * 3
    assert not chunk.choices
    assert chunk.usage == answer.usage
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = served.stream("hello", stream_options=options)[1]
    counts = [one.usage.completion_tokens for one in chunks]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1], len(chunks[-1].choices)) == (0, len(ANSWERS["hello"]) + 1, 0)
    prompts = ["<|im_start|>assistant\n1. ", "<|im_start|>user\nhello"]
    options = {"model": served.model, "max_tokens": 9, "temperature": 0}
    create = partial(served.client.completions.create, **options)
    alone = [create(prompt=prompt).choices[0].text for prompt in prompts]
    ids = [tokenizer_of_bytes()(prompt).input_ids for prompt in prompts]
    for several in (prompts, ids):
        found = create(prompt=several, n=2).choices
        assert [one.text for one in found] == [alone[0], alone[0], alone[1], alone[1]]
    assert create(prompt=ids[0]).choices[0].text == alone[0]


def test_choices_have_seeds_one_after_another(alone):
    options = {"temperature": 3, "max_tokens": 20}
    several = alone.ask("hello", n=3, seed=5, **options).choices
    for number, choice in enumerate(several):
        (own,) = alone.ask("hello", seed=5 + number, **options).choices
        assert own.message == choice.message
    last = alone.ask("hello", n=2, seed=2**64 - 1, **options).choices[1]
    assert last.message == alone.ask("hello", seed=0, **options).choices[0].message


def test_probabilities_are_the_models_own(alone, folder):
    """Whole and streamed, at any temperature; those of what stops a text are not told."""
    model = Qwen2ForCausalLM.from_pretrained(folder)
    ids = torch.tensor([tokenizer_of_bytes().encode("<|im_start|>assistant\n1. it")])
    best = model(ids).logits[0, -1].log_softmax(-1).topk(3)
    create = partial(alone.client.completions.create, model=alone.model, prompt=ids[0].tolist())
    told = create(max_tokens=5, logprobs=3, temperature=2, seed=1).choices[0].logprobs
    assert sorted(told.top_logprobs[0].values()) == near(sorted(best.values.tolist()), terms=1000)
    assert len(told.tokens) == len(told.token_logprobs) == 5
    ends = accumulate(map(len, told.tokens), initial=0)
    assert told.text_offset == [*ends][:5]
    chunks = create(max_tokens=5, logprobs=3, temperature=2, seed=1, stream=True)
    shown = [one.choices[0].logprobs for one in chunks if one.choices[0].logprobs]
    assert [at for one in shown for at in one.text_offset] == told.text_offset
    whole = alone.ask("list", logprobs=True, top_logprobs=2, stop="1. item").choices[0]
    likely = whole.logprobs.content
    assert "".join(one.token for one in likely) == LIST[: LIST.index("1. item")]
    assert all(bytes(one.bytes).decode() == one.token for one in likely)
    assert all(len(one.top_logprobs) == 2 and one.logprob <= 0 for one in likely)
    _, chunks = alone.stream("list", logprobs=True, top_logprobs=2, stop="1. item")
    shown = [one for c in chunks if c.choices[0].logprobs for one in c.choices[0].logprobs.content]
    assert [one.token for one in shown] == [one.token for one in likely]
    answer = alone.client.responses.create(
        model=alone.model, input="hello", include=["message.output_text.logprobs"], top_logprobs=1
    )
    (part,) = answer.output[0].content
    assert "".join(one.token for one in part.logprobs) == part.text == ANSWERS["hello"]


@pytest.mark.parametrize(("at_once", "stream"), [(1, True), (7, False), (1000, True)])
def test_a_prompt_is_told_before_its_answer(alone, folder, monkeypatch, at_once, stream):
    """With the model's own probabilities, however many tokens of it are fed at once."""
    model, tokenizer = Qwen2ForCausalLM.from_pretrained(folder), tokenizer_of_bytes()
    monkeypatch.setattr(workers, "_LOGITS", at_once * len(tokenizer))
    prompt = "<|im_start|>assistant\n1. item"
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    logprobs = model(ids).logits[0, :-1].log_softmax(-1)
    told = logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()
    best = logprobs.max(-1).values.tolist()
    create = partial(alone.client.completions.create, model=alone.model, temperature=0, echo=True)
    for asked, most in ((prompt, 0), (prompt, 4), (ids[0].tolist(), 4)):
        answer = create(prompt=asked, max_tokens=most, logprobs=1, stream=stream)
        texts, logs, tops, offsets = "", [], [], []
        for one in answer if stream else [answer]:
            texts += one.choices[0].text
            if (found := one.choices[0].logprobs) is not None:
                logs, tops = logs + found.token_logprobs, tops + found.top_logprobs
                offsets += found.text_offset
        behind = tokenizer.decode(model.generate(ids, max_new_tokens=4)[0, ids.shape[1] :])
        assert texts == prompt + (behind if most else "")
        assert len(logs) == len(offsets) == ids.shape[1] + most
        assert logs[0] is tops[0] is None
        assert logs[1 : ids.shape[1]] == near(told, terms=1000)
        assert [max(one.values()) for one in tops[1 : ids.shape[1]]] == near(best, terms=1000)
        assert one.choices[0].finish_reason == "length"
    several = create(prompt=[[40], [41, 42]], max_tokens=1, logprobs=0)
    assert [len(one.logprobs.tokens) for one in several.choices] == [2, 3]
    assert (several.usage.prompt_tokens, several.usage.completion_tokens) == (3, 2)


def test_prompts_come_back_without_probabilities_in_either_mode(served):
    create = partial(served.client.completions.create, model=served.model, temperature=0)
    prompt = "<|im_start|>assistant\n1."
    behind = create(prompt=prompt, max_tokens=5).choices[0].text
    for most, text in ((5, prompt + behind), (0, prompt)):
        answer = create(prompt=prompt, max_tokens=most, echo=True, stop="<")
        assert (answer.choices[0].text, answer.usage.completion_tokens) == (text, most)
        assert answer.choices[0].finish_reason == "length"


def test_prompts_whose_cache_has_no_parts_are_told_whole(tmp_path, monkeypatch):
    tokenizer = tokenizer_of_bytes()
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
    model = MambaForCausalLM(MambaConfig(vocab_size=len(tokenizer), **sizes))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(workers, "_LOGITS", 10 * len(tokenizer))
    with serving(str(tmp_path)) as served:
        create = partial(served.client.completions.create, model=served.model, echo=True)
        ids = [*range(40, 51)]
        told = create(prompt=ids, max_tokens=1, logprobs=0).choices[0].logprobs.token_logprobs
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = [logprobs[at, token].item() for at, token in enumerate(ids[1:])]
        assert told[1:-1] == near(expected, terms=1000)
        with pytest.raises(openai.BadRequestError, match="at most 11 tokens") as found:
            create(prompt=[*ids, 51], max_tokens=0, logprobs=0)
        assert found.value.param == "echo"
        assert create(prompt=[*ids, 51], max_tokens=0).choices[0].text


def test_tokens_that_came_are_penalised(alone, folder):
    """By as much as the API says, the prompt's not."""
    model = Qwen2ForCausalLM.from_pretrained(folder)
    tokenizer = tokenizer_of_bytes()
    prompt = tokenizer.encode("<|im_start|>assistant\n1. it")
    text, expected = list(prompt), []
    for _ in range(30):
        logits = model(torch.tensor([text])).logits[0, -1]
        for token in set(expected):
            logits[token] -= 0.6 + 0.9 * expected.count(token)
        text.append(int(logits.argmax()))
        expected.append(text[-1])
    options = {"presence_penalty": 0.6, "frequency_penalty": 0.9, "max_tokens": 30}
    create = partial(alone.client.completions.create, model=alone.model, temperature=0)
    found = create(prompt=prompt, **options).choices[0].text
    assert found == tokenizer.decode(expected, skip_special_tokens=True)
    assert found != create(prompt=prompt, max_tokens=30).choices[0].text
    biased = answered(alone, logit_bias={"40": 100})["choices"][0]["message"]["content"]
    assert len(set(biased)) == 1


def test_responses_are_whole_unless_a_stream_is_asked_for(served):
    create = partial(served.client.responses.create, model=served.model, input="hello")
    answer = create()
    assert (answer.output_text, answer.status) == (ANSWERS["hello"], "completed")
    cut = create(max_output_tokens=5, instructions="Be brief.")
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    events = [*create(stream=True)]
    assert [one.sequence_number for one in events] == [*range(len(events))]
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    deltas = "".join(one.delta for one in events if one.type == "response.output_text.delta")
    assert deltas == events[-1].response.output_text == ANSWERS["hello"]
    assert events[-1].response.usage == answer.usage
    tool = {"type": "function", **TOOL["function"]}
    called = create(input="rain?", tools=[tool])
    assert called.tools[0].name == "weather"
    (call,) = called.output
    assert (call.type, call.name) == ("function_call", "weather")
    events = [*create(input="rain?", tools=[tool], stream=True)]
    done = [one for one in events if one.type == "response.function_call_arguments.done"]
    assert [one.arguments for one in done] == [call.arguments]
    assert events[-1].response.output[0].name == "weather"
    back = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    create(input=[{"role": "user", "content": "rain?"}, call.model_dump(), back], tools=[tool])


def test_what_a_template_leaves_out_is_refused(tmp_path, folder):
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}:{% endif %}"
    )
    with serving(changed_model(folder, tmp_path / "model", template)) as served:
        body = {"messages": ASKED, "tools": [TOOL]}
        refused(served, "chat/completions", "tools", "unsupported_parameter", body)
        body = {"messages": [{"role": "system", "content": "Be brief."}, *ASKED]}
        error = refused(served, "chat/completions", "messages", "unsupported_value", body)
        assert "messages.0" in error["message"]
        answered(served)


def test_a_worker_that_died_is_replaced(folder, monkeypatch):
    def broken(*_, **__):
        raise ValueError("the disk at /secret")

    with serving(folder, batching=True) as served:
        answered(served)
        with monkeypatch.context() as patched:
            patched.setattr(Qwen2ForCausalLM, "forward", broken)
            status, _ = hello(served)
        assert status in (500, 503)
        wait_until(lambda: get(f"{served.url}/health")[0] == 503)
        # One that came while the worker died, and that nobody looks at, is not left waiting.
        worker, failed = served.service.worker, []
        job = SimpleNamespace(written=SimpleNamespace(deliver=failed.append))
        worker._open["nobody's"] = job
        worker._fail_if_dead()
        assert [type(one) for one in failed] == [Failed]
        assert not worker._open
        answered(served)
        assert get(f"{served.url}/health")[0] == 200


def test_prompts_end_where_the_cache_does(folder):
    """One that does not fit is refused, and an answer ends where there is no more room."""
    with serving(folder, batching=True, num_blocks=16) as served:
        status, text = hello(served, **of_user("x" * 1000))
        assert status == 400
        assert "messages: expected 1 to 256 tokens, got 10" in text
        answer = answered(served, max_tokens=57, **of_user("x" * 181))
        if answer["choices"][0]["finish_reason"] == "length":
            assert answer["usage"]["total_tokens"] == 257  # the last one is not stored
        answered(served)


@pytest.mark.parametrize("batching", [False, True])
def test_prompts_end_where_positions_do(tmp_path, batching):
    tokenizer = tokenizer_of_bytes()
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes))
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with serving(str(tmp_path), batching=batching) as served:
        status, text = hello(served, **of_user("x" * 80))
        assert status == 400
        assert "messages: expected 1 to 64 tokens, got 99" in text
        body = {"messages": ASKED, "max_tokens": 500}
        refused(served, CHAT, "max_tokens", "context_length_exceeded", body)
        answer = answered(served, max_tokens=None)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["total_tokens"] == 65


def test_calls_that_are_cut_are_text(served):
    answer = served.ask("rain?", tools=[TOOL], max_tokens=40).choices[0]
    assert answer.finish_reason == "length"
    assert answer.message.tool_calls is None
    text, chunks = served.stream("rain?", tools=[TOOL], max_tokens=40)
    assert text.strip() == answer.message.content == CALL[len("<tool_call>\n") : 40]
    assert chunks[-1].choices[0].finish_reason == "length"


TEXTS = {
    CALL: (1, ""),
    f"well {CALL}\n{CALL}": (2, "well"),
    f"{CALL}\n{CALL[:40]}": (1, CALL[len("<tool_call>\n") : 40]),
    "<tool_call>\nnot JSON\n</tool_call> and more": (0, "not JSON\n</tool_call> and more"),
    '<tool_call>\n{"city": "Ghent"}\n</tool_call>': (0, '{"city": "Ghent"}'),
    '<tool_call>\n["Ghent"]\n</tool_call>': (0, '["Ghent"]'),
}


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_no_call_is_text(text):
    tokenizer = tokenizer_of_bytes()
    model = SimpleNamespace(config=SimpleNamespace(model_type="qwen2"))
    form = Form(tokenizer, model, [], frozenset(), 1000, parts=True)
    written = Written(form, lambda piece: None)
    written.put(tokenizer(text).input_ids)
    written.end()
    calls, content = TEXTS[text]
    assert (len(written.calls), written.text().strip()) == (calls, content)


@pytest.mark.parametrize("batching", [False, True])
def test_figures_are_what_was_counted(folder, batching):
    """The answer for which the model was tested is one of them."""
    assistant = SamAssistant(fallback=None, memory=OutputMemory(), budget=8)
    with serving(folder, assistant, batching=batching) as served:
        for asked in ("list", "hello", "list", "rain?"):
            served.ask(asked)
        served.stream("list")
        # Counted as the answer is sent.
        wait_until(lambda: served.metrics()["requests_total",] == 6)
        assert hello(served, n=0)[0] == 400
        assert get(f"{served.url}/v1/nowhere")[0] == 404
        found = served.metrics()
    total = assistant.stats.total
    assert (found["requests_total",], found["tokens_total",]) == (total.calls, total.tokens)
    # Every step brings a token besides; the prefill the first one.
    accepted = found["accepted_tokens_total",]
    assert accepted == total.tokens - 6 - found["forwards_total",]
    assert accepted <= found["drafted_tokens_total",]
    sources = {key[1]: value for key, value in found.items() if key[0] == "source_tokens_total"}
    assert max(sources.values()) <= accepted <= sum(sources.values())
    assert total.seconds["forward"] >= found["seconds_total", "forward"] > 0
    assert found["queue_seconds_count",] == 6
    chats = "http_seconds_count", "/v1/chat/completions"
    assert (found[*chats, "200"], found[*chats, "400"]) == (5, 1)
    assert found["http_seconds_count", "none", "404"] == 1
    assert found["http_seconds_sum", *chats[1:], "200"] > found["queue_seconds_sum",] > 0
    assert (found["running",], found["waiting",]) == (0, 0)


@pytest.mark.parametrize("route", BODIES)
def test_a_stream_sends_its_head_at_once(alone, held, route):
    """Before there is a token; the answer is the same then."""
    held.clear()
    with contextlib.closing(connected(alone.url, route, BODIES[route] | {"stream": True})) as found:
        found.settimeout(30)
        assert found.recv(1 << 16).startswith(b"HTTP/1.1 200")
        wait_until(lambda: held.waits)
        assert (alone.metrics()["running",], alone.metrics()["waiting",]) == (1, 0)
        held.set()
        text = b""
        while not re.search(rb"\[DONE\]|response.completed|response.incomplete", text):
            text += found.recv(1 << 16)


BATCHING = ["--continuous-batching", "--cb-num-blocks", "64"]


@pytest.mark.slow
@pytest.mark.parametrize("batching", [[], BATCHING])
def test_the_command_serves_until_it_is_interrupted(folder, tmp_path, batching):
    port, log = free_port(), tmp_path / "log"
    command = [sys.executable, "-m", "hf_retrieval_assist.tools.cli", "serve", folder, *batching]
    command += ["--port", str(port), "--host", "127.0.0.1", "--memory", str(log)]
    command += ["--device", "cpu", "--log-level", "warning"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: process.poll() is not None or healthy(url))
        assert process.poll() is None, process.stderr.read()
        answer = Served(url, None, folder).ask("hello")
        assert answer.choices[0].message.content == ANSWERS["hello"]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) in (0, 130)
    finally:
        process.kill()
    # What was written is there for the next server.
    assert len(OutputMemory(path=log)) == 1


def test_a_release_without_what_the_server_extends_is_named(monkeypatch, capsys):
    for name in ("app", "service", "workers", "batching"):
        monkeypatch.delitem(sys.modules, f"hf_retrieval_assist.extensions.serving.{name}")
    gone = "transformers.generation.continuous_batching.cache_allocators"
    monkeypatch.setitem(sys.modules, gone, None)
    assert main(["serve", "model"]) == 1
    told = capsys.readouterr().err
    assert "expected transformers 5.20 or a later release" in told
    assert f"got {__version__} (" in told
    assert gone in told
