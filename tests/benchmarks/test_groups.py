"""The benchmark of groups of samples, on a model that is small and random."""

import pytest

from benchmarks import groups

from ..support.benchmarks import quick, silent
from ..support.byte_model import small_model

pytestmark = pytest.mark.slow


def test_groups_write_plains_texts_and_are_counted(monkeypatch):
    monkeypatch.setattr(groups, "load", lambda arguments: small_model())
    report = groups.run(quick(), silent)
    times, counts = report.tables
    assert [row["method"] for row in times.rows] == [method.name for method in groups.timed()]
    assert {row["same"] for row in times.rows} == {"1 of 1"}
    assert {row["per_forward"] for row in times.rows[:2]} == {1}
    found = {(row["decoding"], row["rows"], row["epoch"], row["fallback"]) for row in counts.rows}
    tables = groups.FALLBACKS
    assert found == {("greedy", 1, 1, table) for table in tables} | {
        ("temperature 0.7", rows, epoch, table)
        for table in tables
        for rows, epoch in ((1, 1), (2, 1), (2, 2))
    }
    assert all(1 <= row["per_forward"] <= 5 for row in counts.rows)
