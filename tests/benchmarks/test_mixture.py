"""Training the weights of mixing: what is kept of the way, and what is left out of a judgement."""

import numpy as np
import pytest

from benchmarks import mixture
from benchmarks.simulation import simulate

from ..support.benchmarks import phrases

pytestmark = pytest.mark.slow


@pytest.fixture
def way(monkeypatch):
    """The weights after each portion of a training."""
    weights = []

    def watched(assistant, requests, **options):
        found = simulate(assistant, requests, **options)
        weights.append(assistant.drafters[0].mixer.weights.copy())
        return found

    monkeypatch.setattr(mixture, "simulate", watched)
    monkeypatch.setattr(mixture, "TOKENS", 72)  # a portion is one request
    return weights


def test_weights_are_the_mean_over_the_second_half_of_their_way(way):
    """A trace that has ended teaches nothing more."""
    trained = mixture.train([phrases("a", 0), phrases("b", 1)], rounds=2)
    assert len(way) == 12  # two traces from three sources
    late = np.mean([mixture.untrained().weights, *way][6:], axis=0)
    assert np.array_equal(trained.weights, late)
    assert trained.weights.dtype == np.float32
    assert trained.cells[..., 1].max() <= 20
    way.clear()
    mixture.train([phrases("a", 0)], rounds=5)
    assert len(way) == 9


def test_a_trace_is_judged_with_weights_of_the_others(monkeypatch):
    trained_on = []

    def train(traces):
        trained_on.append([trace.name for trace in traces])
        return mixture.untrained()

    monkeypatch.setattr(mixture, "train", train)
    report = mixture.judge([phrases("a", 0), phrases("b", 1), phrases("c", 2)], requests=1)
    assert trained_on == [["b", "c"], ["a", "c"], ["a", "b"]]
    rows = report.tables[0].rows
    assert {row["trace"] for row in rows[:5]} == {"a"}
    assert [row["nodes"] for row in rows[:5]] == ["16", "32", "64", "CPU", "GPU"]
    assert len(rows) == 15
    assert all(row["accepted"] > 1 for row in rows)
    assert [row["speed"] is None for row in rows[:5]] == [True, True, True, False, False]
