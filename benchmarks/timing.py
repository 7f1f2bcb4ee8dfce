"""Fair comparison within one process: alternating order, medians."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import TypeVar

from .report import Report

T = TypeVar("T")

# What mlockall is told to lock: all that there is, and all that will be.
LOCKED = 3


def alternate(
    candidates: Mapping[str, Callable[[], T]],
    repeats: int,
    progress: Callable[[str], None],
    typical: Callable[[Sequence[float]], float] = median,
) -> tuple[dict[str, float], dict[str, T]]:
    """Median (or other `typical`) seconds and last result of each candidate."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    results: dict[str, T] = {}
    for repeat, order in enumerate(orders(list(candidates), repeats)):
        for name in order:
            progress(f"{name}, run {repeat + 1} of {repeats}")
            started = time.perf_counter()
            results[name] = candidates[name]()
            seconds[name].append(time.perf_counter() - started)
    return {name: typical(times) for name, times in seconds.items()}, results


def orders(names: Sequence[str], repeats: int) -> Iterator[list[str]]:
    """The names once for each repeat, every other time backwards.

    A machine that slows down or speeds up so meets all of them alike.
    """
    for repeat in range(repeats):
        yield list(names) if repeat % 2 == 0 else list(reversed(names))


def lock_memory(report: Report) -> None:
    """Keep all pages of the process in memory; the report notes where the system does not."""
    if sys.platform == "win32" or ctypes.CDLL(None).mlockall(LOCKED):
        report.note("the system did not let the process lock its memory")
