"""The server, driven by the API's own client: plain answers, predictions, bad requests, figures."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    ContinuousBatchingConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    set_seed,
)
from transformers.cli.serve import Serve

from hf_retrieval_assist import OutputMemory, SamAssistant
from hf_retrieval_assist.serving import build_app

TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant', 'tool') %}"
    "{{ raise_exception('a role that nobody has') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LIST = "".join(f"{i}. item {i % 3} of the list\n" for i in range(6))
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ghent"}}\n</tool_call>'
ANSWERS = {"list": LIST, "rain?": CALL, "hello": "hello, and hello again"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of today",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def tokenizer_of_bytes():
    alphabet = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that has learnt three answers by heart."""
    tokenizer = tokenizer_of_bytes()
    set_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    texts = []
    for asked, answer in ANSWERS.items():
        messages = [{"role": "user", "content": asked}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        texts.append(tokenizer(f"{prompt}{answer}<|im_end|>").input_ids)
    width = max(map(len, texts))
    ids = torch.tensor([text + [tokenizer.eos_token_id] * (width - len(text)) for text in texts])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(150):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    path = tmp_path_factory.mktemp("model")
    model.generation_config.do_sample = False
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def get(url, body=None):
    """The status and the text of an answer; `body`: what is posted."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def listening(app):
    """The base URL of an application that is served on the loopback address."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        end = time.monotonic() + 60
        while not server.started:
            assert time.monotonic() < end
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


class Served:
    def __init__(self, url, assistant, model):
        self.url, self.assistant, self.model = url, assistant, model
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def ask(self, asked, **options):
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        options = {"temperature": 0, "max_tokens": 200} | options
        return self.client.chat.completions.create(model=self.model, messages=messages, **options)

    def stream(self, asked, **options):
        """The text, and the last chunk."""
        chunks = list(self.ask(asked, stream=True, **options))
        return "".join(c.choices[0].delta.content or "" for c in chunks), chunks

    def metrics(self):
        families = text_string_to_metric_families(get(f"{self.url}/metrics")[1])
        return {
            (
                sample.name.removeprefix("hf_retrieval_assist_"),
                *sample.labels.values(),
            ): sample.value
            for family in families
            for sample in family.samples
        }


@pytest.fixture(scope="module", params=["one by one", "side by side"])
def served(folder, request):
    assistant = SamAssistant(memory=OutputMemory(), budget=8)
    batching = request.param == "side by side"
    app = build_app(
        folder,
        assistant,
        continuous_batching=batching,
        cb_config=ContinuousBatchingConfig(page_size=16, num_blocks=256, max_batch_tokens=256),
        device="cpu",
        dtype="float32",
    )
    with listening(app) as url:
        yield Served(url, assistant, folder)


@pytest.fixture(scope="module")
def theirs(folder):
    """transformers' own server."""
    port = free_port()
    serve = Serve(folder, device="cpu", dtype="float32", port=port, non_blocking=True)
    url = f"http://localhost:{port}"
    end = time.monotonic() + 60
    while True:
        with contextlib.suppress(urllib.error.URLError):
            if get(f"{url}/health")[0] == 200:
                break
        assert time.monotonic() < end
        time.sleep(0.05)
    yield Served(url, None, folder)
    serve.kill_server()


@pytest.mark.parametrize("asked", ["list", "hello", "something that it was never asked"])
def test_chats_are_answered_as_by_the_server_without_an_assistant(served, theirs, asked):
    plain, ours = theirs.ask(asked), served.ask(asked)
    assert ours.choices == plain.choices
    assert ours.usage == plain.usage
    text, chunks = served.stream(asked)
    assert text == plain.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == plain.choices[0].finish_reason
    assert chunks[-1].usage == plain.usage


def test_tools_are_called(served, theirs):
    plain, ours = (which.ask("rain?", tools=[TOOL]) for which in (theirs, served))
    assert [choice.finish_reason for choice in ours.choices] == ["tool_calls"]
    (call,) = ours.choices[0].message.tool_calls
    assert call.function == plain.choices[0].message.tool_calls[0].function
    assert json.loads(call.function.arguments) == {"city": "Ghent"}
    _, chunks = served.stream("rain?", tools=[TOOL])
    streamed = [c.choices[0].delta.tool_calls for c in chunks if c.choices[0].delta.tool_calls]
    assert [call[0].function.name for call in streamed] == ["weather"]


def test_completions(served, theirs):
    options = {"model": served.model, "prompt": "<|im_start|>assistant\n1. it", "max_tokens": 40}
    plain = theirs.client.completions.create(temperature=0, **options)
    assert served.client.completions.create(temperature=0, **options).choices == plain.choices


@pytest.mark.parametrize("parts", [False, True])
def test_predictions_are_drafted_and_told(served, theirs, parts):
    changed = LIST.replace("3. item 0", "3. thing 9")
    content = [{"type": "text", "text": changed}] if parts else changed
    prediction = {"type": "content", "content": content}
    plain = theirs.ask("list")
    served.assistant.memory.forget()
    drafted = served.assistant.stats.total.accepted
    ours = served.ask("list", prediction=prediction)
    end = time.monotonic() + 10
    while served.assistant.stats.total.accepted <= drafted:  # counted when a step comes after it
        assert time.monotonic() < end
        time.sleep(0.01)
    assert ours.choices == plain.choices
    text, chunks = served.stream("list", prediction=prediction)
    assert text == plain.choices[0].message.content
    for usage in (ours.usage, chunks[-1].usage):
        told = usage.completion_tokens_details
        assert told.accepted_prediction_tokens + told.rejected_prediction_tokens == len(changed)
        assert 0 < told.rejected_prediction_tokens < len(changed) // 3
    assert served.ask("list").usage.completion_tokens_details is None


BAD = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "nobody", "content": "x"}]}, "a role that nobody has"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "expected text"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]},
        "arguments",
    ),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"seed": "x"}, "seed"),
    ({"stop": [1]}, "stop"),
    ({"prediction": "text"}, "prediction"),
    ({"prediction": {"type": "content", "content": [{"type": "text"}]}}, "expected text"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"no_such_field": 1}, "no_such_field"),
    ({"model": "another"}, "another"),
    ({"generation_config": "{"}, "Expecting"),
]


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_bad_requests_are_told_what_is_wrong(served, bad, message):
    good = {"model": served.model, "messages": [{"role": "user", "content": "hello"}]}
    status, text = get(f"{served.url}/v1/chat/completions", good | bad)
    assert 400 <= status < 500, text
    assert message in text


def test_bad_completions_are_told_what_is_wrong(served):
    for bad in ({"prompt": [1, 2]}, {"prompt": ""}, {"prompt": "x", "max_tokens": -1}, {}):
        status, text = get(f"{served.url}/v1/completions", {"model": served.model} | bad)
        assert status == 422, text
        assert "prompt" in text or "max_tokens" in text
    assert get(f"{served.url}/v1/chat/completions", b"{")[0] == 422


def test_a_client_that_goes_away_costs_the_others_nothing(served, theirs):
    plain = theirs.ask("list").choices
    for _ in range(3):
        stream = served.ask("list", stream=True)
        for _ in zip(range(5), stream, strict=False):
            pass
        stream.close()
        assert served.ask("list").choices == plain


def test_sixteen_clients_at_once(served, theirs):
    asked = [["list", "hello", "rain?", "what else?"][i % 4] for i in range(32)]
    plain = {text: theirs.ask(text).choices[0].message.content for text in set(asked)}
    with ThreadPoolExecutor(16) as clients:
        answers = clients.map(
            lambda i: (
                served.stream(asked[i])[0]
                if i % 3
                else served.ask(asked[i]).choices[0].message.content
            ),
            range(32),
        )
        assert list(answers) == [plain[text] for text in asked]


def test_figures(served):
    before = served.metrics()
    served.ask("list")
    text = served.ask("list")
    served.ask("hello")  # by which the request before it is counted
    after = served.metrics()
    assert after["tokens_total",] - before["tokens_total",] >= text.usage.completion_tokens
    assert after["requests_total",] - before["requests_total",] >= 2
    accepted = after["accepted_tokens_total",] - before["accepted_tokens_total",]
    drafted = after["drafted_tokens_total",] - before["drafted_tokens_total",]
    forwards = after["forwards_total",] - before["forwards_total",]
    assert 0 < accepted <= drafted
    assert forwards > 0
    assert ("source_tokens_total", "token_recycling") in after
    assert ("seconds_total", "forward") in after


BATCHING = ["--continuous-batching", "--cb-num-blocks", "64"]


@pytest.mark.parametrize("batching", [[], pytest.param(BATCHING, marks=pytest.mark.slow)])
def test_the_command_serves_until_it_is_interrupted(folder, tmp_path, batching):
    port, log = free_port(), tmp_path / "log"
    command = [sys.executable, "-m", "hf_retrieval_assist.cli", "serve", folder, *batching]
    command += ["--port", str(port), "--host", "127.0.0.1", "--memory", str(log)]
    command += ["--device", "cpu", "--log-level", "warning"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + 60
        while True:
            with contextlib.suppress(urllib.error.URLError):
                get(f"{url}/health")
                break
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < end
            time.sleep(0.1)
        answer = Served(url, None, folder).ask("hello")
        assert answer.choices[0].message.content == ANSWERS["hello"]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) in (0, 130)
    finally:
        process.kill()
    # What was written is there for the next server.
    assert len(OutputMemory(path=log)) == 1
