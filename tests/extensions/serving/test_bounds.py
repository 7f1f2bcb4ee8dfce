"""What one request may cost the others: what is refused before it is read, whose turn it is, and
whose place is free again."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import openai
import pytest
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM
from transformers.cli.serving.utils import Modality

from hf_retrieval_assist.extensions.serving import service
from hf_retrieval_assist.extensions.serving.prompts import Prompts
from hf_retrieval_assist.extensions.serving.refusals import RefusedError
from hf_retrieval_assist.extensions.serving.service import Limits
from hf_retrieval_assist.extensions.serving.workers import Job, OneByOne
from tests.support.memories import wait_until
from tests.support.served import (
    ANSWERS,
    ASKED,
    connected,
    get,
    health,
    posted,
    serving,
    tenancy,
    tokenizer_of_bytes,
)

# What is refused for its size alone, by route and field.
LARGE = [
    ("completions", "prompt", " " * 161, "context_length_exceeded"),
    ("completions", "prompt", [7] * 21, "context_length_exceeded"),
    ("chat/completions", "messages", 21 * ASKED, "context_length_exceeded"),
    ("responses", "input", " " * 161, "context_length_exceeded"),
    ("completions", "prediction", " " * 65, "context_length_exceeded"),
    ("completions", "prompt", ["a"] * 17, "invalid_value"),
    ("chat/completions", "n", 17, "invalid_value"),
]


@pytest.fixture(scope="module")
def small(folder):
    with serving(folder, limits=Limits(prompt_tokens=20, answer_tokens=8, waiting=16)) as found:
        yield found


def test_what_is_large_is_refused_before_it_is_taken_apart(small, monkeypatch):
    def taken_apart(self, text, *_, **__):
        raise AssertionError(f"{len(text)} characters")

    with monkeypatch.context() as patched:
        patched.setattr(PreTrainedTokenizerFast, "_encode_plus", taken_apart)
        for route, field, value, code in LARGE:
            if field == "prediction":
                value = {"type": "content", "content": value}
            status, answer = posted(small, route, **{field: value})
            told = status, answer["error"]["param"], answer["error"]["code"]
            assert told == (400, field, code)
    # Choices and prompts count together.
    status, answer = posted(small, "completions", prompt=["a"] * 6, n=3)
    assert (status, answer["error"]["param"]) == (400, "n")
    assert "at most 16 answers" in answer["error"]["message"]
    _, answer = posted(small, "completions", prompt=["a"] * 4, n=4, max_tokens=1)
    assert len(answer["choices"]) == 16


def test_bodies_are_as_long_as_prompts_may_be(small, alone):
    for one, tokens in ((small, 20), (alone, 32_768)):
        most = (1 << 20) + 32 * tokens
        assert posted(one, "completions", prompt="x" * (most - 100))[0] == 400
        status, answer = posted(one, "completions", prompt="x" * most)
        assert (status, answer["error"]["code"]) == (413, "request_too_large")


@pytest.fixture
def gate(monkeypatch):
    """Reading of long requests waits until it is set; which were read, by their first letters."""
    gate = threading.Event()
    gate.read = []
    of = Prompts.of

    def wait(self, fields):
        text = getattr(fields, "prompt", [""])[0]
        if len(text) > 50:
            gate.read.append(text[0])
            assert gate.wait(30)
        return of(self, fields)

    monkeypatch.setattr(Prompts, "of", wait)
    monkeypatch.setattr(service, "LIGHT", 80)
    yield gate
    gate.set()


def test_tenants_have_their_turns_in_reading(folder, gate):
    with serving(folder, tenants=tenancy()[-1]) as served, ThreadPoolExecutor(4) as clients:
        going = []
        for letter, tenant in (("a", "acme"), ("b", "acme"), ("c", "acme"), ("x", "globex")):
            options = {"prompt": 60 * letter, "max_tokens": 1, "headers": {"x-tenant": tenant}}
            going.append(clients.submit(posted, served, "completions", **options))
            count = len(going)
            wait_until(lambda n=count: health(served)[1]["waiting"] == n)
        # What takes long to read holds no short request.
        assert posted(served, max_tokens=4, headers={"x-tenant": "globex"})[0] == 200
        gate.set()
        assert [one.result()[0] for one in going] == [200] * 4
    assert gate.read == ["a", "x", "b", "c"]


def test_who_leaves_while_it_is_read_frees_its_place(folder, gate):
    with serving(folder, limits=Limits(waiting=1)) as served:
        client = connected(served.url, "completions", {"prompt": 60 * "a"})
        wait_until(lambda: health(served)[1]["waiting"] == 1)
        assert posted(served)[0] == 429
        client.close()
        wait_until(lambda: health(served)[1]["waiting"] == 0)
        gate.set()
        wait_until(lambda: served.service._readers.is_idle)
        assert not served.service.worker.going_on


class Turns(OneByOne):
    """A worker that generates nothing, and notes whose turn it was."""

    def __init__(self, folder):
        self.going, self.turns = threading.Event(), []
        super().__init__(Qwen2ForCausalLM.from_pretrained(folder), tokenizer_of_bytes(), None)

    def _generate(self, job):
        self.turns.append(job.request)
        assert self.going.wait(30)


def jobs(request, tenant, count, length=1):
    written = SimpleNamespace(
        form=SimpleNamespace(prompt_ids=[1] * length), end=lambda: None, deliver=lambda _: None
    )
    return [Job({}, None, written, request, tenant) for _ in range(count)]


def test_tenants_and_requests_have_their_turns(folder):
    """Who comes has no turn before those who waited longer, however seldom it comes."""
    worker = Turns(folder)
    worker.submit(jobs("many", "acme", 3))
    wait_until(lambda: worker.turns)
    worker.submit(jobs("another", "acme", 1))
    worker.submit(jobs("other", "globex", 2))
    worker.submit(jobs("third", "initech", 1))
    left = jobs("left", "initech", 1)
    worker.submit(left)
    worker.leave(left[0])
    worker.going.set()
    wait_until(lambda: not worker.going_on and len(worker.turns) == 7)
    assert worker.turns == ["many", "other", "third", "another", "other", "many", "many"]
    assert not worker._turns
    worker.close()


def test_a_tenant_fills_its_own_places_alone(folder, held):
    """It is told when to come again, and others are served."""
    limits = Limits(waiting=2)
    with serving(folder, tenants=tenancy()[-1], limits=limits) as served:
        held.clear()
        with ThreadPoolExecutor(4) as clients:

            def ask(tenant, **options):
                headers = {"x-tenant": tenant}
                return clients.submit(served.ask, "hello", extra_headers=headers, **options)

            going = [ask("acme")]
            wait_until(lambda: held.waits)
            going.append(ask("acme", n=2))
            wait_until(lambda: health(served)[1]["waiting"] == 2)
            with pytest.raises(openai.RateLimitError) as found:
                ask("acme").result()
            assert found.value.code == "rate_limit_exceeded"
            assert int(found.value.response.headers["retry-after"]) >= 1
            going.append(ask("globex"))
            wait_until(lambda: health(served)[1]["waiting"] == 3)
            held.set()
            choices = [choice for one in going for choice in one.result().choices]
            assert [one.message.content for one in choices] == 4 * [ANSWERS["hello"]]


def test_health_tells_how_long_ago_the_last_step_was(folder, held, monkeypatch):
    monkeypatch.setattr(service, "LONGEST_STEP", 0.5)
    with serving(folder, limits=Limits(seconds=1.0)) as served:
        nothing = {"running": 0, "waiting": 0, "seconds_since_step": None}
        assert health(served) == (200, {"status": "alive", **nothing})
        held.clear()
        with ThreadPoolExecutor(1) as clients:
            going = clients.submit(posted, served)
            wait_until(lambda: held.waits)
            status, told = health(served)
            assert (status, told["running"], told["waiting"]) == (200, 1, 0)
            assert 0 <= told["seconds_since_step"] <= 1
            assert going.result()[0] == 504
            # The step that is stuck outlives its request.
            wait_until(lambda: health(served)[0] == 503)
            assert get(f"{served.url}/ready")[0] == 503
            held.set()
            wait_until(lambda: health(served) == (200, {"status": "alive", **nothing}))
            assert get(f"{served.url}/ready")[0] == 200


@pytest.mark.parametrize(
    ("kind", "part", "here"),
    [
        ("image_url", {"image_url": {"url": "data:image/png;base64,AA=="}}, True),
        ("input_image", {"image_url": "data:image/png;base64,AA=="}, True),
        ("input_audio", {"input_audio": {"data": "AA==", "format": "wav"}}, True),
        ("image_url", {"image_url": {"url": "http://10.0.0.1/x.png"}}, False),
        ("image_url", {"image_url": "/etc/passwd"}, False),
        ("video_url", {"video_url": {"url": "file:///etc/passwd"}}, False),
        ("input_audio", {"input_audio": "/etc/passwd"}, False),
        ("input_audio", {"input_audio": {"data": "/etc/passwd"}}, False),
        ("image_url", {}, False),
    ],
)
def test_nothing_is_fetched_for_a_prompt(kind, part, here):
    prompts = Prompts(None, tokenizer_of_bytes(), Modality.MULTIMODAL, 100)
    message = {"role": "user", "content": [{"type": kind, **part}]}
    if here:
        prompts._check("messages.0", "messages", message)
    else:
        with pytest.raises(RefusedError, match=r"messages\.0\.content\.0: expected data: URLs"):
            prompts._check("messages.0", "messages", message)
