"""The server's bounds: what may wait, how long, whose it is, and what ends when somebody leaves."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import wraps

import openai
import pytest
from transformers import Qwen2ForCausalLM

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.extensions.serving import workers
from hf_retrieval_assist.extensions.serving.app import build_app
from hf_retrieval_assist.extensions.serving.service import Limits
from hf_retrieval_assist.tools.cli import main
from tests.support.memories import wait_until
from tests.support.served import (
    ANSWERS,
    LIST,
    changed_model,
    connected,
    get,
    listening,
    serving,
)
from tests.support.watching import a_librarys

PART = 64
LONG = "list " * 300
FORWARD = Qwen2ForCausalLM.forward


@pytest.fixture
def slow(monkeypatch):
    """Parts of prompts that are small and take their time; how many were fed."""
    fed = []

    @wraps(FORWARD)
    def forward(self, input_ids=None, **options):
        if input_ids is not None and input_ids.shape[1] > 1:
            fed.append(input_ids.shape[1])
            time.sleep(0.02)
        return FORWARD(self, input_ids=input_ids, **options)

    monkeypatch.setattr(workers, "PART", PART)
    monkeypatch.setattr(Qwen2ForCausalLM, "forward", a_librarys(forward))
    return fed


def refusal(call, *arguments, **options):
    with pytest.raises(openai.APIError) as found:
        call(*arguments, **options)
    return found.value


@pytest.mark.slow
def test_short_requests_pass_a_long_prompt(folder, slow):
    with serving(folder) as served:
        options = {"max_tokens": 20, "temperature": 2, "seed": 4}
        plain = served.ask(LONG, **options).choices
        assert len(slow) > 50
        slow.clear()
        with ThreadPoolExecutor(1) as pool:
            long = pool.submit(served.ask, LONG, **options)
            wait_until(lambda: len(slow) > 3)
            for asked in ("hello", "list", "hello"):
                answer = served.ask(asked).choices[0].message.content
                assert answer.strip() == ANSWERS[asked].strip()
                assert not long.done()
            drawn = [served.ask("hello", temperature=3, seed=5).choices for _ in range(2)]
            assert drawn[0] == drawn[1]
            assert long.result().choices == plain
        # A part of two prompts at once is none: each was fed once.
        assert sum(n for n in slow if n > 1) >= 1000


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_whose_client_leaves_is_not_fed_to_its_end(folder, slow, stream):
    messages = [{"role": "user", "content": LONG}]
    with serving(folder) as served:
        connection = connected(
            served.url, "chat/completions", {"messages": messages, "stream": stream}
        )
        wait_until(lambda: len(slow) > 3)
        connection.close()
        wait_until(lambda: not served.service.worker.going_on)
        assert len(slow) < 30
        assert served.ask("hello").choices[0].message.content == ANSWERS["hello"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("settings", [{}, {"num_beams": 2}], ids=str)
def test_a_request_takes_no_longer_than_it_may(folder, tmp_path, held, settings, stream):
    """However the model's own configuration has it decoded."""
    path = changed_model(folder, tmp_path / "model", **settings)
    with serving(path, limits=Limits(seconds=1.0)) as served:
        forwards = held.forwards
        held.clear()
        error = refusal(served.stream if stream else served.ask, "hello", max_tokens=3000)
        assert error.code == "timeout"
        assert stream or error.status_code == 504
        held.set()
        wait_until(lambda: not served.service.worker.going_on)
        # Those that have begun by the time that the worker looks end; it asked for 3,000 tokens.
        assert held.forwards <= forwards + 20
        assert served.ask("hello", max_tokens=2).choices[0].message.content == "he"


def test_prompts_and_answers_keep_to_their_bounds(folder):
    limits = Limits(prompt_tokens=60, answer_tokens=30)
    with serving(folder, limits=limits) as served:
        for bad, options in (("x" * 60, {}), ("hello", {"max_tokens": 31})):
            assert refusal(served.ask, bad, **options).code == "context_length_exceeded"
        cut = served.ask("list", max_tokens=None)
        assert (cut.usage.completion_tokens, cut.choices[0].finish_reason) == (30, "length")


@pytest.mark.parametrize("batching", [False, True])
def test_streams_of_which_half_are_left(folder, batching):
    """Nothing of those that left goes on, and the others are whole."""
    with serving(folder, batching=batching) as served:

        def ask(number):
            # A client may hand on the id of what it was asked itself.
            headers = {"x-request-id": "trace"}
            stream, text = served.ask("list", stream=True, extra_headers=headers), ""
            for count, chunk in enumerate(stream):
                assert chunk.id == "trace"
                text += chunk.choices[0].delta.content or ""
                if number % 2 and count == 5 + number % 40:
                    stream.close()
                    return None
            return text

        with ThreadPoolExecutor(24) as clients:
            found = [*clients.map(ask, range(24))]
        assert found == [None if number % 2 else LIST.strip() for number in range(24)]
        worker = served.service.worker
        wait_until(lambda: not worker.going_on)
        assert not (worker._manager.output_router.result_handlers if batching else worker._waiting)
        assert served.ask("list").choices[0].message.content == LIST.strip()


def test_a_server_that_ends_tells_those_who_wait(folder, held):
    with serving(folder) as served:
        held.clear()
        with ThreadPoolExecutor(3) as pool:
            going = [pool.submit(refusal, served.ask, "hello") for _ in range(3)]
            wait_until(lambda: held.waits and len(served.service.worker._waiting) == 2)
            assert not served.service.close()  # its forward goes on
            assert [one.result().status_code for one in going] == [503] * 3
        assert get(f"{served.url}/ready")[0] == 503
        held.set()
        wait_until(served.service.close)
        assert get(f"{served.url}/health")[0] == 503
        assert refusal(served.ask, "hello").status_code == 503


def test_a_model_that_cannot_be_tested_is_to_be_started_again(folder, monkeypatch):
    def broken(*_, **__):
        raise ValueError("no such kernel")

    monkeypatch.setattr(Qwen2ForCausalLM, "forward", broken)
    app = build_app(folder, SamAssistant(), device="cpu", dtype="float32")
    with listening(app) as url:
        wait_until(lambda: get(f"{url}/health")[0] == 503)
        assert get(f"{url}/ready")[0] == 503


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["/nosuch"], "expected a folder or hub id, got /nosuch, which is none"),
        (["{}", "--private", "--memory", "x"], "--private: expected no --memory"),
        (["{}", "--private", "--tenants", "header:x"], "--private: expected no --tenants"),
        (["{}", "--tenants", "header:"], "--tenants: expected header:NAME, got no name"),
        (["{}", "--admin-key", "x"], "--admin-key: expected --tenants beside it"),
        (["{}", "--tenants", "header:x", "--continuous-batching"], "tenants: expected none beside"),
    ],
)
def test_commands_that_cannot_serve_say_why(folder, capsys, options, told):
    before = signal.getsignal(signal.SIGTERM)
    assert main(["serve", *[one.format(folder) for one in options]]) == 1
    assert told in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before
