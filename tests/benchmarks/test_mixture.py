"""Training the weights of mixing: what is kept of the way, and what is left out of a judgement."""

import pytest

from benchmarks import mixture

from ..support.benchmarks import phrases

pytestmark = pytest.mark.slow


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
