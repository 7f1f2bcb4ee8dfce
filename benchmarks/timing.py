"""Fair comparison within one process: alternating order, medians."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import TypeVar

T = TypeVar("T")


def alternate(
    candidates: Mapping[str, Callable[[], T]], repeats: int, progress: Callable[[str], None]
) -> tuple[dict[str, float], dict[str, T]]:
    """Median seconds and last result of each candidate.

    The order turns round with every repeat, so that a machine that slows down or speeds up meets
    all candidates alike.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    results: dict[str, T] = {}
    names = list(candidates)
    for repeat in range(repeats):
        for name in names if repeat % 2 == 0 else reversed(names):
            progress(f"{name}, run {repeat + 1} of {repeats}")
            started = time.perf_counter()
            results[name] = candidates[name]()
            seconds[name].append(time.perf_counter() - started)
    return {name: median(times) for name, times in seconds.items()}, results


def mean_us(calls: Iterable[Callable[[], object]], limit_s: float) -> float | None:
    """Mean microseconds of the calls, of as many as `limit_s` seconds allow; None without any."""
    count, spent = 0, 0.0
    for call in calls:
        started = time.perf_counter()
        call()
        spent += time.perf_counter() - started
        count += 1
        if spent > limit_s:
            break
    return 1e6 * spent / count if count else None
