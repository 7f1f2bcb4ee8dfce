"""The server, driven by the API's own client: plain answers, predictions, bad requests, figures."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2ForCausalLM, __version__
from transformers.cli.serve import Serve
from transformers.cli.serving.utils import (
    CBGenerateManager,
    ToolCall,
    build_response_parser,
    get_response_template,
    response_events_to_chunks,
)

from hf_retrieval_assist import OutputMemory, SamAssistant
from hf_retrieval_assist.extensions.serving.managers import Parser, parsed
from hf_retrieval_assist.tools.cli import main
from tests.support.memories import wait_until
from tests.support.redis_process import free_port
from tests.support.served import (
    ANSWERS,
    CALL,
    LIST,
    TOOL,
    Served,
    get,
    learned,
    serving,
    tokenizer_of_bytes,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return learned(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=["one by one", "side by side"])
def served(folder, request):
    with serving(folder, batching=request.param == "side by side") as found:
        yield found


@pytest.fixture
def alone(folder):
    """One request after another, for what does not depend on it."""
    with serving(folder) as found:
        yield found


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


@pytest.mark.parametrize("asked", ["list", "hello", "something that it was never asked"])
def test_chats_are_answered_as_by_the_server_without_an_assistant(served, theirs, asked):
    """And texts completed; a client that goes away costs the others nothing."""
    plain, ours = theirs.ask(asked), served.ask(asked)
    assert ours.choices == plain.choices
    assert ours.usage == plain.usage
    text, chunks = served.stream(asked)
    assert text == plain.choices[0].message.content
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


@pytest.mark.parametrize("parts", [False, True])
def test_predictions_are_drafted_and_told(served, theirs, parts):
    changed = LIST.replace("3. item 0", "3. thing 9")
    content = [{"type": "text", "text": changed}] if parts else changed
    prediction = {"type": "content", "content": content}
    plain = theirs.ask("list")
    served.assistant.memory.forget()
    drafted = served.assistant.stats.total.accepted
    ours = served.ask("list", prediction=prediction)
    # Counted when a step comes after it.
    wait_until(lambda: served.assistant.stats.total.accepted > drafted)
    assert ours.choices == plain.choices
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
OF_NO_TEXT = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
# What a field may not be, and what is said of it besides its name.
FIELDS = {
    "messages": [[], [OF_NO_TEXT], of_user(5)["messages"], of_user(SURROGATE)["messages"]],
    "prediction": ["text", {"type": "content", "content": SURROGATE}],
    "temperature": [-1, float("inf"), 10**400],
    "max_tokens": [0],
    "max_completion_tokens": [-5],
    "top_p": [0],
    "frequency_penalty": [-1],
    "seed": [2**64],
    "stop": [["a", ""]],
    "chat_template_kwargs": [{"tokenize": False}, {"padding": "max_length", "max_length": 10**9}],
    "logit_bias": [{"x": 1}, {"-1": 1}, {"20": float("nan")}, {"999999": 5}],
    "generation_config": ["{", {"do_sample": False}, '{"top_k": "many", "do_sample": true}'],
    "no_such_field": [1],
}
WAYS = ('{"num_return_sequences": 3}', '{"num_beams": 1000000}', '{"assistant_early_exit": 1}')
UNSERVED = {"n": 2, "logprobs": True, "presence_penalty": 1.5, "tool_choice": "required"}
UNSERVED["response_format"] = {"type": "json_object"}
CHATS = [
    *(({name: bad}, name) for name, values in FIELDS.items() for bad in values),
    *(({"generation_config": way}, "generation_config: ") for way in WAYS),
    *(({name: value}, f"{name}: not served") for name, value in UNSERVED.items()),
    ({"messages": [5]}, "messages.0"),
    ({"messages": [{"content": "x"}]}, "messages: KeyError: 'role'"),
    ({"messages": [{"role": "nobody", "content": "x"}]}, "a role that nobody has"),
    (of_user(PARTS), "messages: KeyError: 'text'"),
    ({"prediction": {"type": "content", "content": PARTS}}, "prediction.content.0.text"),
    ({"tools": [5]}, "tools.0"),
    ({"tools": [{"type": "function", "function": 5}], "messages": [{"role": 1}]}, "tools"),
    ({"logit_bias": {"999999": 5}, "stream": True}, "logit_bias"),
    ({SURROGATE: 1}, "ud83d"),
    ({"model": "another"}, "another"),
]


@pytest.mark.parametrize(("bad", "message"), CHATS)
def test_bad_chats_are_told_what_is_wrong(served, bad, message):
    status, text = hello(served, **bad)
    assert 400 <= status < 500, text
    assert message in text


OTHERS = [
    ("/v1/completions", {"prompt": [1, 2]}, "prompt"),
    ("/v1/completions", {"prompt": ""}, "prompt"),
    ("/v1/completions", {}, "prompt: Field required"),
    ("/v1/completions", {"prompt": "x", "max_tokens": -1}, "max_tokens"),
    ("/v1/completions", {"prompt": "x", "best_of": 2}, "best_of: not served"),
    ("/v1/completions", {"prompt": "x", "logprobs": 3}, "logprobs: not served"),
    ("/v1/responses", {}, "input: Field required"),
    ("/v1/responses", {"input": [5]}, "input.0"),
    ("/v1/responses", {"input": [{"role": "user", "content": 5}]}, "input: TypeError"),
    ("/v1/responses", {"input": [{"type": "function_call"}]}, "input"),
    ("/v1/responses", {"input": SURROGATE}, "input"),
    ("/v1/responses", {"input": "x", "tools": [5]}, "tools.0"),
    ("/v1/responses", {"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ("/v1/responses", {"input": "x", "parallel_tool_calls": "x"}, "parallel_tool_calls"),
    ("/v1/responses", {"input": "x", "previous_response_id": "y"}, "previous_response_id"),
    ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_object"}}}, "text"),
    ("/v1/systemone", {"state": float("nan"), "questions": {}}, "questions"),
    ("/v1/systemone", {"state": SURROGATE, "questions": {"q": {}}}, "state"),
    ("/v1/audio/transcriptions", {}, "transcribes nothing"),
    ("/load_model", {"model": 5}, "model"),
    ("/load_model", {"model": "another"}, "model"),
]


@pytest.mark.parametrize(("route", "bad", "message"), OTHERS)
def test_bad_requests_of_other_routes_are_told_what_is_wrong(served, route, bad, message):
    whose = {} if route in ("/load_model", "/v1/audio/transcriptions") else {"model": served.model}
    for body in (bad, bad | {"stream": True}) if route == "/v1/responses" else (bad,):
        status, text = get(f"{served.url}{route}", whose | body)
        assert 400 <= status < 500, text
        assert message in text


@pytest.mark.parametrize("raw", [b"{", b"NaN", b'"\\ud83d"', b"[]", b'{"a":' * 500, b"\xff", b""])
def test_what_is_no_object_is_refused(served, raw):
    for route in ("chat/completions", "completions", "responses"):
        assert 400 <= get(f"{served.url}/v1/{route}", raw)[0] < 500


def test_requests_that_say_nothing_unusual_are_served(served, theirs):
    plain = answered(theirs)["choices"]
    unusual = {"n": 1, "logprobs": False, "presence_penalty": 0, "tool_choice": "auto", "user": "x"}
    unusual |= {"stop": [], "seed": None, "chat_template_kwargs": None, "stream_options": None}
    for body in (unusual, {"max_tokens": 8.0}, {"temperature": "0"}):
        assert answered(served, **body)["choices"] == plain
    # Anybody may ask for so many.
    for most in (10**30, 10**400):
        answered(served, max_tokens=most)


def test_settings_that_all_share_are_no_clients(served, theirs):
    """No request beside others may bring settings, and the first one leaves none behind."""
    side_by_side = served.assistant.stats.last.tier == "continuous batching"
    settings = {"logit_bias": {"40": 100}, "stop": "1. item", "frequency_penalty": 1}
    for name, value in settings.items():
        status, text = hello(served, **of_user("list"), **{name: value})
        assert status == (422 if side_by_side else 200)
        assert not side_by_side or text.startswith(f'{{"detail":"{name}: ')
        if status == 200 and name == "logit_bias":
            assert len(set(json.loads(text)["choices"][0]["message"]["content"])) == 1
    assert served.ask("list").choices == theirs.ask("list").choices


def broken(*_, **__):
    raise ValueError("the disk at /secret")


@pytest.mark.parametrize("field", [{}, {"stop": "x"}, {"generation_config": '{"top_k": 3}'}])
@pytest.mark.parametrize("stream", [False, True])
def test_faults_of_the_server_are_told_to_no_client(alone, monkeypatch, stream, field):
    monkeypatch.setattr(Qwen2ForCausalLM, "forward", broken)
    status, text = hello(alone, stream=stream, **field)
    assert (status, text) == (500, "Internal Server Error")


def test_what_a_stream_fails_by_is_told_to_no_client(served, monkeypatch):
    """It fails after its first token, when the status has gone out."""
    fed = []

    def fail(self, text):
        fed.append(text)
        if len(fed) > 3:
            raise RuntimeError("the disk at /secret")
        return [{"type": "region_chunk", "field": "content", "text": text}]

    monkeypatch.setattr(Parser, "feed", fail)
    status, text = hello(served, stream=True)
    assert status == 200
    assert '{"error": "the answer could not be completed"}' in text
    assert "secret" not in text


def test_a_worker_that_died_is_replaced(folder, monkeypatch):
    with serving(folder, batching=True) as served:
        answered(served)
        with monkeypatch.context() as patched:
            patched.setattr(Qwen2ForCausalLM, "forward", broken)
            status, _ = hello(served)
        assert status in (500, 503)
        assert get(f"{served.url}/health")[0] == 503
        answered(served)
        assert get(f"{served.url}/health")[0] == 200


@pytest.mark.parametrize("batching", [False, True])
def test_a_server_that_was_reset_serves_again(folder, monkeypatch, batching):
    """It serves the model that it loads then."""
    ended, stop = [], CBGenerateManager.stop
    monkeypatch.setattr(CBGenerateManager, "stop", lambda manager: ended.append(stop(manager)))
    with serving(folder, batching=batching) as served:
        before = answered(served)["choices"]
        assert get(f"{served.url}/reset", {})[0] == 200
        assert len(ended) == batching
        assert answered(served)["choices"] == before


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_end_where_the_cache_does(folder, stream):
    """One that does not fit is refused, and an answer ends where there is no more room."""
    with serving(folder, batching=True, num_blocks=16) as served:
        status, text = hello(served, stream=stream, **of_user("x" * 3000))
        assert status == 422
        assert "messages: expected 1 to 256 tokens, got 30" in text
        answer = answered(served, max_tokens=200, **of_user("x" * 180))
        if answer["choices"][0]["finish_reason"] == "length":
            assert answer["usage"]["total_tokens"] == 257  # the last one is not stored
        answered(served)


@pytest.mark.parametrize("batching", [False, True])
def test_prompts_end_where_positions_do(tmp_path, batching):
    tokenizer = tokenizer_of_bytes()
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes))
    model.generation_config.do_sample = False
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with serving(str(tmp_path), batching=batching) as served:
        for stream in (False, True):
            status, text = hello(served, stream=stream, **of_user("x" * 80))
            assert status == 422
            assert "messages: expected 1 to 64 tokens, got 99" in text
        answer = answered(served, max_tokens=500)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["total_tokens"] == 65


def test_sixteen_clients_at_once_with_one_id(served, theirs):
    """A client may hand on the id of what it was asked itself, to requests side by side too."""
    asked = [["list", "hello", "rain?", "what else?"][i % 4] for i in range(32)]
    plain = {text: theirs.ask(text).choices[0].message.content for text in set(asked)}
    headers = {"x-request-id": "trace"}

    def ask(number):
        if number % 3:
            return served.stream(asked[number], extra_headers=headers)[0]
        answer = served.ask(asked[number], extra_headers=headers)
        assert answer.id == "trace"
        return answer.choices[0].message.content

    with ThreadPoolExecutor(16) as clients:
        assert [*clients.map(ask, range(32))] == [plain[text] for text in asked]


def test_calls_that_are_cut_are_text(served):
    answer = served.ask("rain?", tools=[TOOL], max_tokens=40).choices[0]
    assert answer.finish_reason == "length"
    assert answer.message.tool_calls is None
    assert answer.message.content == CALL[:40]
    text, chunks = served.stream("rain?", tools=[TOOL], max_tokens=40)
    assert text == CALL[len("<tool_call>") : 40]
    assert chunks[-1].choices[0].finish_reason == "length"


TEXTS = {
    CALL: (1, ""),
    f"well {CALL}\n{CALL}": (2, "well"),
    f"{CALL}\n{CALL[:40]}": (0, f"{CALL}\n{CALL[:40]}"),
    "<tool_call>\nnot JSON\n</tool_call> and more": (0, None),
    '<tool_call>\n{"city": "Ghent"}\n</tool_call>': (0, None),
    '<tool_call>\n["Ghent"]\n</tool_call>': (0, None),
}


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_no_call_is_text(folder, text):
    tokenizer = tokenizer_of_bytes()
    ids = tokenizer(text).input_ids
    model = SimpleNamespace(config=SimpleNamespace(model_type="qwen2"))
    template = get_response_template(tokenizer, model)
    calls, content = TEXTS[text]
    found = parsed(tokenizer, ids, template, prefix="")
    assert len(found.get("tool_calls") or []) == calls
    assert found.get("content", "") == (text if content is None else content)
    # Streamed, complete calls before it are calls.
    parser = Parser(build_response_parser(tokenizer, model, []))
    items = []
    for piece in re.findall(r".{1,3}", text, re.DOTALL):
        items += response_events_to_chunks(parser.feed(piece))
    items += response_events_to_chunks(parser.finalize()[1])
    assert sum(isinstance(item, ToolCall) for item in items) == max(calls, text.count(CALL))
    assert parser.written == text
    if content is None:
        assert re.sub("</?tool_call>", "", text).strip() == "".join(items).strip() or "more" in text


@pytest.mark.parametrize("setting", ['"num_beams": 2', '"prompt_lookup_num_tokens": 3'])
def test_predictions_beside_other_ways_of_decoding(alone, theirs, setting):
    config = {"generation_config": f'{{{setting}, "max_new_tokens": 8}}'}
    ours = answered(alone, **config, prediction={"type": "content", "content": "hello"})
    assert ours["choices"] == answered(theirs, **config)["choices"]
    assert ours["usage"]["completion_tokens_details"]


@pytest.mark.parametrize("batching", [False, True])
def test_figures_are_what_was_counted(folder, batching):
    assistant = SamAssistant(fallback=None, memory=OutputMemory(), budget=8)
    with serving(folder, assistant, batching=batching) as served:
        written = 0
        for asked in ("list", "hello", "list", "rain?", "list"):
            written += served.ask(asked).usage.completion_tokens
        # Counted as the answer is sent.
        wait_until(lambda: served.metrics()["requests_total",] == 5)
        found = served.metrics()
    total = assistant.stats.total
    assert found["requests_total",] == total.calls == 5
    assert found["tokens_total",] == total.tokens == written
    assert found["forwards_total",] == total.forwards
    assert found["drafted_tokens_total",] == total.drafted
    assert found["accepted_tokens_total",] == total.accepted
    # Every step brings a token besides; the prefill the first one.
    assert total.accepted == written - 5 - total.forwards
    sources = {key[1]: value for key, value in found.items() if key[0] == "source_tokens_total"}
    assert sources == assistant.stats.sources
    assert max(sources.values()) <= total.accepted <= sum(sources.values())
    assert found["seconds_total", "forward"] == total.seconds["forward"] > 0


BATCHING = ["--continuous-batching", "--cb-num-blocks", "64"]


@pytest.mark.parametrize("batching", [[], pytest.param(BATCHING, marks=pytest.mark.slow)])
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
    for name in ("app", "handlers", "managers", "batching"):
        monkeypatch.delitem(sys.modules, f"hf_retrieval_assist.extensions.serving.{name}")
    gone = "transformers.generation.continuous_batching.cache_allocators"
    monkeypatch.setitem(sys.modules, gone, None)
    assert main(["serve", "model"]) == 1
    told = capsys.readouterr().err
    assert "expected transformers 5.20 or a later release" in told
    assert f"got {__version__} (" in told
    assert gone in told
