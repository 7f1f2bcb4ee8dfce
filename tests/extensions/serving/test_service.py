"""The server's bounds: what may wait, how long, whose it is, and what ends when somebody leaves."""

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import wraps

import openai
import pytest
from transformers import Qwen2ForCausalLM

from hf_retrieval_assist import OutputMemory, SamAssistant
from hf_retrieval_assist.extensions.serving import workers
from hf_retrieval_assist.extensions.serving.app import build_app
from hf_retrieval_assist.extensions.serving.refusals import RefusedError
from hf_retrieval_assist.extensions.serving.service import Limits, Service
from hf_retrieval_assist.extensions.serving.tenants import Tenants, read_keys
from hf_retrieval_assist.tools.cli import main
from tests.support.memories import wait_until
from tests.support.served import ANSWERS, LIST, connected, get, listening, serving
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


def chat(content, **options):
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, **options}


def running(served):
    """Answers that go on."""
    worker = served.service.worker
    own = worker._running if isinstance(worker, workers.OneByOne) else worker._open
    return len(own)


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
    with serving(folder) as served:
        connection = connected(served.url, "chat/completions", chat(LONG, stream=stream))
        wait_until(lambda: len(slow) > 3)
        connection.close()
        wait_until(lambda: not running(served))
        assert len(slow) < 30
        assert served.ask("hello").choices[0].message.content == ANSWERS["hello"]


def test_more_answers_than_may_wait_are_sent_away(folder, held):
    with serving(folder, limits=Limits(waiting=4)) as served:
        held.clear()
        with ThreadPoolExecutor(3) as pool:
            going = []
            for number in range(2):
                going.append(pool.submit(served.ask, "hello", n=2))
                wait_until(lambda n=number: len(served.service.worker._waiting) == 1 + 2 * n)
            error = refusal(served.ask, "hello", n=2)
            assert isinstance(error, openai.RateLimitError)
            assert error.code == "rate_limit_exceeded"
            assert int(error.response.headers["retry-after"]) >= 1
            going.append(pool.submit(served.ask, "hello"))
            wait_until(lambda: len(served.service.worker._waiting) == 4)
            held.set()
            found = [choice.message.content for one in going for choice in one.result().choices]
            assert found == 5 * [ANSWERS["hello"]]
        served.ask("hello", n=4)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_takes_no_longer_than_it_may(folder, held, stream):
    with serving(folder, limits=Limits(seconds=1.0)) as served:
        held.clear()
        error = refusal(served.stream if stream else served.ask, "hello")
        assert error.code == "timeout"
        assert stream or error.status_code == 504
        held.set()
        wait_until(lambda: not running(served))
        assert served.ask("hello").choices[0].message.content == ANSWERS["hello"]


@pytest.mark.slow
def test_prompts_and_answers_keep_to_their_bounds(folder):
    limits = Limits(prompt_tokens=60, answer_tokens=30)
    with serving(folder, limits=limits) as served:
        for bad, options in (("x" * 60, {}), ("hello", {"max_tokens": 31})):
            assert refusal(served.ask, bad, **options).code == "context_length_exceeded"
        cut = served.ask("list", max_tokens=None)
        assert (cut.usage.completion_tokens, cut.choices[0].finish_reason) == (30, "length")
    # The owner may serve more than the model was trained for.
    with serving(folder, limits=Limits(prompt_tokens=50_000)) as served:
        served.ask("x" * 33_000, max_tokens=1)


@pytest.mark.slow
@pytest.mark.parametrize("batching", [False, True])
def test_streams_of_which_half_are_left(folder, batching):
    """Nothing of those that left goes on, and the others are whole."""
    with serving(folder, batching=batching) as served:

        def ask(number):
            stream = served.ask("list", stream=True)
            texts = []
            for chunk in stream:
                texts.append(chunk.choices[0].delta.content or "")
                if number % 2 and len(texts) == 5 + number % 40:
                    stream.close()
                    return None
            return "".join(texts)

        with ThreadPoolExecutor(96) as clients:
            found = [*clients.map(ask, range(96))]
        assert found == [None if number % 2 else LIST.strip() for number in range(96)]
        wait_until(lambda: not running(served))
        worker = served.service.worker
        left = worker._manager.output_router.result_handlers if batching else worker._waiting
        assert not left
        assert served.ask("list").choices[0].message.content == LIST.strip()


def test_bodies_are_bounded(folder):
    with serving(folder) as served:
        status, text = get(f"{served.url}/v1/completions", {"prompt": "x" * (17 << 20)})
        assert (status, json.loads(text)["error"]["code"]) == (413, "request_too_large")
        assert served.ask("hello").choices[0].message.content == ANSWERS["hello"]


def test_an_answer_that_is_left_is_not_generated_to_its_end(folder):
    with serving(folder, batching=True) as served:
        stream = served.ask("what else?", stream=True, max_tokens=3000)
        next(chunk for chunk in stream if chunk.choices[0].delta.content)
        stream.close()
        wait_until(lambda: not running(served))
        served.ask("hello")
        scheduler = served.service.worker._manager.batch_processor.scheduler
        wait_until(lambda: not scheduler.active_requests)
        wait_until(lambda: served.metrics()["requests_total",] == 2)
        assert served.metrics()["tokens_total",] < 2000


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


def test_requests_that_come_before_the_model_is_tested_wait(folder, held, monkeypatch):
    tested = []
    monkeypatch.setattr(Service, "on_ready", staticmethod(lambda: tested.append(True)))
    with serving(folder) as served:
        assert tested == [True]
        assert get(f"{served.url}/health")[0] == get(f"{served.url}/ready")[0] == 200
        served.service.is_ready = False
        assert get(f"{served.url}/ready")[0] == 503
        assert served.ask("hello").choices[0].message.content == ANSWERS["hello"]


def test_a_model_that_cannot_be_tested_is_to_be_started_again(folder, monkeypatch):
    def broken(*_, **__):
        raise ValueError("no such kernel")

    monkeypatch.setattr(Qwen2ForCausalLM, "forward", broken)
    app = build_app(folder, SamAssistant(), device="cpu", dtype="float32")
    with listening(app) as url:
        wait_until(lambda: get(f"{url}/health")[0] == 503)
        assert get(f"{url}/ready")[0] == 503


def tenancy(memory, shared, **options):
    made = []

    def make(name):
        assistant = SamAssistant(memory=memory.namespace(name), budget=8)
        assistant.stats = assistant.policy.stats = shared.stats
        made.append(assistant)
        return assistant

    return made, Tenants(make, lambda name: memory.namespace(name).forget(), **options)


@pytest.mark.parametrize("by", ["key", "header"])
def test_tenants_draft_from_their_own_outputs_alone(folder, by):
    memory = OutputMemory()
    shared = SamAssistant(memory=memory, budget=8)
    whose = {"header": "x-tenant"} if by == "header" else {"keys": {"k1": "acme", "k2": "globex"}}
    made, tenants = tenancy(memory, shared, admin_key="all", **whose)
    with serving(folder, shared, tenants=tenants) as served:

        def ask(key, name):
            client = openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0)
            headers = {"x-tenant": name} if name else {}
            return client.with_options(default_headers=headers).chat.completions.create(
                model=served.model, **chat("list")
            )

        answers = [ask("k1", "acme"), ask("k2", "globex"), ask("k1", "acme")]
        assert {one.choices[0].message.content for one in answers} == {LIST.strip()}
        assert len(made) == 2
        assert [len(memory.namespace(name)) for name in ("acme", "globex")] == [2, 1]
        error = refusal(ask, "k3", "")
        assert (error.status_code, error.code) == (401, "invalid_api_key")
        erase = f"{served.url}/tenants/acme"
        for key, status in (("k1", 403), ("", 401)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            assert get(erase, method="DELETE", **headers)[0] == status
        assert len(memory.namespace("acme")) == 2
        status, told = get(erase, method="DELETE", authorization="Bearer all")
        assert (status, json.loads(told)["erased"]) == (200, 2)
        assert [len(memory.namespace(name)) for name in ("acme", "globex")] == [0, 1]
        assert served.metrics()["requests_total",] == 3
        ask("k1", "acme")
        assert len(made) == 3  # what the first one had learnt is gone with it


def test_an_erasure_that_others_could_not_be_told_is_no_success(monkeypatch):
    def fail(name):
        raise OSError("the file at /full")

    tenants = Tenants(lambda name: None, fail, header="x", admin_key="all")
    with pytest.raises(RefusedError, match="this process has forgotten 'acme'") as found:
        tenants.erase("acme", {"authorization": "Bearer all"})
    assert found.value.status == 500


def test_keys_of_tenants_are_read_from_a_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# whose\nacme k1\n\nglobex k2\nacme k3\n")
    assert read_keys(path) == {"k1": "acme", "k2": "globex", "k3": "acme"}
    for text in ("", "acme\n", "acme k1\nglobex k1\n", "a b c\n"):
        path.write_text(text)
        with pytest.raises(ValueError, match="expected a tenant's name and"):
            read_keys(path)


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


def test_a_tokenizer_without_a_backend_is_refused():
    with pytest.raises(ValueError, match="m: expected a tokenizer of the tokenizers library, got"):
        Service(None, object(), "m", None, None, Limits())
