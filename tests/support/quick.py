"""Tables of cases of which `make test` runs a few, and `make test-all` all.

A table keeps as many cases as take 1.5 seconds of CPU time, at least one: those that differ in how
they are served (tier, dtype, rows, sampled or not), not in what is changed or refused.
"""

import itertools

import pytest


def cases(table, quick=1):
    """Values for `parametrize`, all of them marked slow but a few.

    Args:
        table: cases; tuples where several arguments are given.
        quick: how many of the first are not slow, or which.
    """
    table = [*table]
    kept = table[:quick] if isinstance(quick, int) else quick
    if unknown := [case for case in kept if case not in table]:
        raise ValueError(f"quick: expected cases of the table, got {unknown}")
    return [case if case in kept else _slow(case) for case in table]


def _slow(case):
    if isinstance(case, tuple):
        return pytest.param(*case, marks=pytest.mark.slow)
    return pytest.param(case, marks=pytest.mark.slow)


def crossed(*tables):
    """Every combination of cases, in front of which stand as few as show each case once."""
    tables = [[*table] for table in tables]
    few = [tuple(table[i % len(table)] for table in tables) for i in range(max(map(len, tables)))]
    return [*few, *(case for case in itertools.product(*tables) if case not in few)]
