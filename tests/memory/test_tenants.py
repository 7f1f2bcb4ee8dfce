"""A memory that tenants share: nothing that one wrote is drafted to another, or seen by it."""

import numpy as np
import pytest

from hf_retrieval_assist import (
    OutputMemory,
    RolloutAssistant,
    SamAssistant,
    SuffixAssistant,
    simulate,
)
from hf_retrieval_assist.planning.cost_store import CostModels
from tests.support.memories import check_memory

RANDOM = np.random.default_rng(0)
TEXT = RANDOM.integers(1, 60, 60).tolist()
# A text whose parts the first one has as well.
OTHER = [*TEXT[:30], *range(60, 70), *TEXT[40:]]


def test_outputs_of_no_named_model_are_adopted_within_a_tenant():
    memory = OutputMemory()
    a, b = memory.namespace("a"), memory.namespace("b")
    a.add(TEXT)
    running = a.start()
    running.extend(TEXT)
    b.add(OTHER)
    assert a.tree("model").token_count == len(TEXT)
    assert memory.tree("model") is None
    assert b.tree("model").token_count == len(OTHER)
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


def test_an_empty_name():
    with pytest.raises(ValueError, match="tenant: expected a name"):
        OutputMemory().namespace("")


@pytest.mark.parametrize("half_life", [None, 2.0])
@pytest.mark.parametrize(
    ("preset", "budget"),
    [
        (SamAssistant, 8),
        (SamAssistant, "paper"),
        (SuffixAssistant, "auto"),
        (SuffixAssistant, "paper"),
        (RolloutAssistant, 8),
    ],
)
def test_no_step_tells_of_another_tenant(preset, budget, half_life):
    """Equal step counts with and without the other's text, which the same tenant's would change."""

    def steps_of_b(*others):
        """Of b's outputs, each of which others' outputs come before."""
        memory, costs = OutputMemory(half_life=half_life), CostModels()
        tenants = {
            name: preset(memory=memory.namespace(name), costs=costs, budget=budget) for name in "ab"
        }
        found = []
        for _ in range(3):
            for name in others:
                simulate(tenants[name], [(TEXT[:1], TEXT[1:])])
            result = simulate(tenants["b"], [(TEXT[:1], OTHER[1:])])
            found.append((result.steps, result.nodes))
        return found

    alone = steps_of_b()
    assert steps_of_b("a") == steps_of_b("a", "a") == alone
    assert steps_of_b("b") != alone
