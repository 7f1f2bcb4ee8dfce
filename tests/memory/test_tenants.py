"""A memory that tenants share: nothing of one shows to another, and one is forgotten everywhere."""

from functools import partial

import numpy as np
import pytest
import torch

from benchmarks.simulation import simulate
from hf_retrieval_assist import OutputMemory, SamAssistant
from hf_retrieval_assist.drafters.base import Feedback, Target
from hf_retrieval_assist.drafters.logit_ngrams import LogitNgramDrafter
from hf_retrieval_assist.papers import SuffixDecoding
from hf_retrieval_assist.policy.cost_store import CostModels
from hf_retrieval_assist.verification.verified import TopLogits
from tests.support.memories import check_memory, count, remembering
from tests.support.one_text import OneText
from tests.support.redis_process import needs_redis
from tests.support.stores import Alone, OnDisk, OnServer, sync

RANDOM = np.random.default_rng(0)
TEXT = RANDOM.integers(1, 60, 60).tolist()
# A text whose parts the first one has as well.
CHANGED = [*TEXT[:30], *range(60, 70), *TEXT[40:]]


def test_outputs_of_no_named_model_are_adopted_within_a_tenant():
    memory = OutputMemory()
    a, b = memory.namespace("a"), memory.namespace("b")
    a.add(TEXT)
    running = a.start()
    running.extend(TEXT)
    b.add(CHANGED)
    assert a.tree("model").token_count == len(TEXT)
    assert memory.tree("model") is None
    assert b.tree("model").token_count == len(CHANGED)
    check_memory(memory)


def test_a_log_keeps_tenants_apart_and_does_not_name_them(tmp_path):
    path = tmp_path / "log"
    OutputMemory(path=path).namespace("a customer").add(TEXT, "model")
    again = OutputMemory(path=path)
    assert again.namespace("a customer").tree("model").token_count == len(TEXT)
    assert again.namespace("another").tree("model") is None
    assert again.tree("model") is None
    written = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert b"customer" not in written


@pytest.mark.parametrize("half_life", [None, 2.0])
@pytest.mark.parametrize(
    "make",
    [
        partial(SamAssistant, budget=8),
        remembering,
        SuffixDecoding,
    ],
)
def test_no_step_tells_of_another_tenant(make, half_life):
    """Equal step counts with and without the other's text, which the same tenant's would change."""

    def steps_of_b(*others):
        """Steps of b's outputs, each of which others' outputs come before."""
        memory, costs = OutputMemory(half_life=half_life), CostModels()
        tenants = {name: make(memory=memory.namespace(name), costs=costs) for name in "ab"}
        found = []
        for _ in range(3):
            for name in others:
                simulate(tenants[name], [(TEXT[:1], TEXT[1:])], vocab_size=70)
            result = simulate(tenants["b"], [(TEXT[:1], CHANGED[1:])], vocab_size=70)
            found.append((result.steps, result.nodes))
        return found

    alone = steps_of_b()
    assert steps_of_b("a") == steps_of_b("a", "a") == alone
    assert steps_of_b("b") != alone


def show(session, tokens):
    """The text goes on with these tokens, each of which was likely where it came."""
    logits = torch.nn.functional.one_hot(torch.tensor(tokens), 3000).float()
    chain = np.arange(len(tokens), dtype=np.int32)
    fed = np.array([TEXT[0], *tokens[:-1]], np.int32)
    session.commit(tokens, Feedback(fed, chain, chain - 1, top=TopLogits(logits)))


@pytest.mark.parametrize("make", [SamAssistant, SuffixDecoding])
def test_what_a_fallback_learns_counts_and_is_forgotten_with_its_tenants_outputs(make):
    memory, target = OutputMemory(), Target(70, fingerprint="m")
    tables = {}
    for name in "ab":
        drafters = make(memory=memory.namespace(name), fallback="logit_ngrams").drafters
        tables[name] = [one for one in drafters if isinstance(one, LogitNgramDrafter)]

    def known(name):
        """Nodes that each table drafts behind the text's first tokens."""
        nodes = []
        for drafter in tables[name]:
            session = OneText(drafter, TEXT[:1], target)
            session.commit(TEXT[1:2], None)
            nodes.append(len(session.propose(8)))
        return nodes

    empty = memory.nbytes
    assert known("a") == known("b") == [0] * len(tables["a"])
    for name in "ab":
        for drafter in tables[name]:
            show(OneText(drafter, TEXT[:1], target), TEXT[1:])
        assert all(known(name))
    assert memory.nbytes > empty
    memory.namespace("a").forget()
    assert known("a") == [0] * len(tables["a"])
    assert all(known("b"))
    memory.forget()
    assert memory.nbytes == empty
    check_memory(memory)


@pytest.mark.parametrize("max_bytes", [60_000, 1 << 20, 8 << 20])
def test_tables_and_outputs_are_together_within_the_bound(max_bytes):
    """Tables that grow, of more tenants than there is room for."""
    memory, target = OutputMemory(max_bytes), Target(3000, fingerprint="m")
    rng, kept = np.random.default_rng(0), set()
    for number in range(6):
        tenant = memory.namespace(f"{number}")
        output = tenant.start("m")
        drafters = [LogitNgramDrafter(memory=tenant)]
        for _ in range(25):  # calls
            sessions = [OneText(one, [1], target) for one in drafters]
            tokens = rng.integers(0, 3000, 100).astype(np.int32)
            output.extend(tokens)
            for session in sessions:
                show(session, tokens.tolist())
                assert memory.nbytes <= max_bytes
        check_memory(memory)
        kept |= {*memory._tables}
    assert 0 < len(memory._tables) < len(kept)
    assert len(memory) > 0


SECRET, OTHER, OPEN = [777777] * 8, [5, 6, 7], [8, 9]
IDS = np.array(SECRET, "<u4").tobytes()


@pytest.fixture(params=[Alone, OnDisk, pytest.param(OnServer, marks=needs_redis)])
def store(request, tmp_path):
    made = request.param(tmp_path)
    yield made
    made.close()


def found(memory):
    """How often the three texts are remembered: a's, b's, and those of no tenant."""
    views = memory.namespace("a"), memory.namespace("b"), memory
    texts = SECRET[:8], OTHER, OPEN
    return [count(view, text, "m") for view, text in zip(views, texts, strict=True)]


def filled(memory):
    memory.namespace("a").add(SECRET, "m")
    memory.namespace("a").namespace("user").add(SECRET, "m")
    memory.namespace("b").add(OTHER, "m")
    memory.add(OPEN, "m")
    return memory


def test_one_tenant_is_forgotten_everywhere(store):
    first, second = filled(store.view()), store.view()
    sync(first, second)
    a = first.namespace("a")
    silent, speaking = a.start("m"), second.namespace("a").start("m")
    speaking.extend(SECRET)
    kept = first.namespace("b").start("m")  # the second process would forget it, too
    kept.extend(OTHER)
    for memory in {first, second}:
        memory.namespace("a").table("learnt", "m", lambda size: np.zeros(10))
    a.forget()
    assert found(first)[0] == len(a) == len(a.namespace("user")) == 0
    sync(first, second)
    for running in (silent, speaking):
        running.extend(SECRET)
        running.close()
    kept.close()
    sync(first, second, third := store.view())
    for memory in (first, second, third):
        assert not memory._tables
        assert found(memory) == [0, 2, 1]
        assert count(memory.namespace("a").namespace("user"), SECRET, "m") == 0
        check_memory(memory)
    assert not store.holds(IDS)
    a.add(SECRET, "m")
    sync(first, second, third)
    assert [found(memory) for memory in (first, second, third)] == [[1, 2, 1]] * 3


def test_the_whole_memory_is_forgotten_only_if_it_is_told_to(store):
    first, second = filled(store.view()), store.view()
    first.namespace("nobody").forget()
    sync(first, second)
    assert found(second) == [1, 1, 1]
    running = first.start("m")
    running.extend(OPEN)
    first.forget()
    sync(first, second)
    assert found(first) == found(second) == [0, 0, 0]
    assert len(second) == 0
    running.extend(OPEN)
    running.close()
    assert not store.holds(IDS)
    second.add(OTHER, "m")
    sync(second, first)
    for memory in (first, second):
        assert found(memory) == [0, 0, 0]
        assert count(memory, OTHER, "m") == 1
        check_memory(memory)


@pytest.mark.filterwarnings("error")
def test_a_tenant_in_a_damaged_log_is_forgotten_here_and_the_damage_is_told(tmp_path):
    path = tmp_path / "log"
    memory = filled(OutputMemory(path=path))
    path.write_bytes(b"something" * 1_000)
    with pytest.raises(ValueError, match="expected a log of outputs"):
        memory.namespace("a").forget()
    assert found(memory) == [0, 1, 1]
    memory.forget()
    memory.add([1, 2])


@pytest.mark.parametrize("name", [None, 7, b"a", ["a"], ""])
def test_what_is_no_name(name):
    """It is checked as the bounds and ids of a memory are."""
    with pytest.raises(ValueError, match="max_bytes: expected at least"):
        OutputMemory(max_bytes=100)
    with pytest.raises(ValueError, match="token_ids: expected ids from 0 to"):
        OutputMemory().add([1, -1])
    with pytest.raises((TypeError, ValueError), match="tenant: expected a name"):
        OutputMemory().namespace(name)


@pytest.mark.parametrize("name", ["\ud800", "a:b", "/", "\0", "x" * 100_000, "ä\n"])
def test_any_name_is_a_tenant_of_its_own(name):
    memory = OutputMemory()
    memory.namespace(name).add(SECRET, "m")
    assert found(memory) == [0, 0, 0]
    assert len(memory.namespace(name[:1] + "other")) == 0
    memory.namespace(name).forget()
    assert len(memory) == 0


@pytest.mark.parametrize("half_life", [None, 4.0])
def test_tenants_that_come_once_leave_nothing(half_life):
    memory = OutputMemory(max_bytes=1 << 20, half_life=half_life)
    for number in range(3_000):
        memory.namespace(f"tenant {number}").add([1, 2, 3, number], "m")
    check_memory(memory)
    assert len(memory._kinds) == len(memory) < 200
