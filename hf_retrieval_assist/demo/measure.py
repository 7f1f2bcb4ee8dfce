"""The demo's tasks measured: plain and assisted in turn, medians of whole calls."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Any

from ..planning.cost_store import CostModels
from .comparison import Comparison, Task, compare

HEADER = (
    f"{'task':<26}{'tokens':>7}{'plain/s':>10}{'assisted/s':>11}{'speedup':>9}"
    f"{'tokens/forward':>16}{'identical':>11}"
)


def measure(
    model: Any, tokenizer: Any, costs: CostModels, repeats: int, tasks: Sequence[Task]
) -> None:
    """Print a row for each task."""
    print(HEADER)
    for task in tasks:
        found = []
        for repeat in range(repeats):
            print(f"{task.title}: run {repeat + 1} of {repeats}", file=sys.stderr)
            found.append(compare(model, tokenizer, task, costs, lambda run: None))
        print(row(task, found))


def row(task: Task, found: list[Comparison]) -> str:
    plain = statistics.median(each.plain.seconds for each in found)
    assisted = statistics.median(each.assisted.seconds for each in found)
    last = found[-1].assisted
    tokens = len(last.tokens)
    return (
        f"{task.title:<26}{tokens:>7}{tokens / plain:>10.1f}{tokens / assisted:>11.1f}"
        f"{plain / assisted:>8.2f}x{tokens / last.forwards:>16.2f}"
        f"{'yes' if all(each.identical for each in found) else 'NO':>11}"
    )
