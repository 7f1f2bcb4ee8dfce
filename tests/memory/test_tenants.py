"""A memory that tenants or prompts share: nothing of one shows to another, and one is forgotten."""

from functools import partial

import numpy as np
import pytest

from benchmarks.simulation import simulate
from hf_retrieval_assist import OutputMemory, SamAssistant
from hf_retrieval_assist.papers import SuffixDecoding
from hf_retrieval_assist.policy.cost_store import CostModels
from tests.support.memories import check_memory, count, remembering, rollouts
from tests.support.redis_process import needs_redis
from tests.support.stores import Alone, OnDisk, OnServer, sync

RANDOM = np.random.default_rng(0)
TEXT = RANDOM.integers(1, 60, 60).tolist()
# A text whose parts the first one has as well.
CHANGED = [*TEXT[:30], *range(60, 70), *TEXT[40:]]


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


def test_samples_of_a_prompt_are_drafted_from_one_another_and_not_for_other_prompts():
    """The second is a token ahead: what it writes, the first may draft."""
    output = list(range(20, 60))
    samples = [([1, 2, 3], [5, *output]), ([1, 2, 3], output)]
    assert simulate(rollouts(fallback=None), samples[:1]).steps == 40
    assert simulate(rollouts(fallback=None), samples, batch_size=2).forwards < 40
    apart = [samples[0], ([1, 2, 4], output)]
    assert simulate(rollouts(fallback=None), apart, batch_size=2).forwards == 40
    assert simulate(rollouts(fallback=None), apart).forwards == 40 + 39


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


@pytest.mark.parametrize("name", [None, b"a", ["a"], ""])
def test_what_is_no_name(name):
    with pytest.raises((TypeError, ValueError), match="tenant: expected a name"):
        OutputMemory().namespace(name)


@pytest.mark.parametrize("half_life", [None, 4.0])
def test_tenants_that_come_once_leave_nothing(half_life):
    memory = OutputMemory(max_bytes=1 << 20, half_life=half_life)
    for number in range(3_000):
        memory.namespace(f"tenant {number}").add([1, 2, 3, number], "m")
    check_memory(memory)
    assert len(memory._kinds) == len(memory) < 200
