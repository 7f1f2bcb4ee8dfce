"""Fair comparison within one process: alternating order, medians."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import mean, median
from typing import TypeVar

from .report import Report

T = TypeVar("T")

RUN = 20  # calls
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


def steady_mean(seconds: Sequence[float]) -> float:
    """The mean without the slowest tenth, in which the machine did something else.

    For calls that are not all alike by design, of which a median shows one kind.
    """
    kept = sorted(seconds)[: -(-9 * len(seconds) // 10)]
    return mean(kept)


def orders(names: Sequence[str], repeats: int) -> Iterator[list[str]]:
    """The names once for each repeat, every other time backwards.

    A machine that slows down or speeds up so meets all of them alike.
    """
    for repeat in range(repeats):
        yield list(names) if repeat % 2 == 0 else list(reversed(names))


def typical_us(calls: Iterable[Callable[[], object]], limit_s: float) -> float | None:
    """Microseconds of a call: the median of the means over RUN calls in a row; None without any.

    The mean keeps work that falls due every few calls, the median drops what other processes did.
    Stops after `limit_s` seconds of calls.
    """
    seconds: list[float] = []
    spent = 0.0
    for call in calls:
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
        spent += seconds[-1]
        if spent > limit_s:
            break
    means = [mean(seconds[i : i + RUN]) for i in range(0, len(seconds), RUN)]
    return 1e6 * median(means) if means else None


def lock_memory(report: Report) -> None:
    """Keep all pages of the process in memory; the report notes where the system does not."""
    if sys.platform == "win32" or ctypes.CDLL(None).mlockall(LOCKED):
        report.note("the system did not let the process lock its memory")
