"""t(n): the measured time of a step that feeds n tokens, learnt from the loop's own steps.

A step is the forward, the walk and what the cache keeps; drafting is counted elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..system.locks import Lock

Float64Array = NDArray[np.float64]

_SLOPE = 0.02  # t(n)/t(1) grows by it per token, as long as one width was fed at most
_HOPE = 0.5  # devices compute many widths in the time of few
_NARROWER = 0.4  # share of the least that was measured, for less than was ever fed
_MUCH = 2.0  # times a mean: a timing that says something new
_BUSY = 1.3  # times what a wider forward takes: means of moments in which the machine was busy
_COUNTED = 10  # the newest timing is at least this part of a mean
_OLD = 512  # timings of other widths, after which a width's mean is hoped to be lower
_AGED = 0.95  # factor


class _Width(NamedTuple):
    """What is known of a width: its mean, of how many timings, and which was the last."""

    seconds: float
    timings: int
    last: int


class CostModel:
    """Learns t(n), the seconds of one step that feeds n tokens per row (the root included).

    Every width that was fed has a running mean, and t(n) is linear between these. Other widths are
    hoped to be cheap, so that each is tried where it might pay; and no width takes longer than a
    wider one.

    First calls allocate and compile, and machines stall. So a timing of more than twice the mean
    counts only if the next one of its width is as long; one of less than half says that all means
    are of slower moments, and learning begins anew; and a mean that is longer than a wider one's is
    forgotten. Since machines also become faster, means of widths that are not fed any more fall.

    Safe to share between threads.

    Args:
        hope: share of the measured slope by which t(n) grows beyond the widest that was fed.

    Attributes:
        shared_width: tokens of other rows that share the forward whose time t(n) is.
        observations: forwards timed so far.
    """

    shared_width = 0

    def __init__(self, hope: float = _HOPE) -> None:
        self._hope = hope
        self._widths: dict[int, _Width] = {}
        self._doubted: set[int] = set()  # widths whose last timing was surprisingly long
        self.observations = 0
        self._curve: Float64Array = np.empty(0)
        self._stale = True
        self._lock = Lock()

    def start_from(self, other: CostModel) -> None:
        """Begin with what is known of similar forwards."""
        with other._lock:
            self._widths = {n: _Width(known.seconds, 1, 0) for n, known in other._widths.items()}
            self._stale = True

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from a step that fed `tokens` tokens per row, or of all packed rows.

        Clocks that stood still teach nothing.
        """
        if tokens < 1:
            raise ValueError(f"tokens: expected at least 1, got {tokens}")
        if seconds > 0:
            with self._lock:
                self._count(tokens, seconds)

    def _count(self, tokens: int, seconds: float) -> None:
        self.observations += 1
        if (known := self._widths.get(tokens)) is None:
            self._refresh(tokens)  # what it was thought to take counts as a timing
            known = _Width(float(self._curve[tokens - 1]), 1, 0)
        mean, timings = known.seconds, known.timings + 1
        if not self._widths or seconds < mean / _MUCH:
            self._widths.clear()
            mean = seconds
        elif seconds > _MUCH * mean:
            if tokens not in self._doubted:
                self._doubted.add(tokens)
                return
            mean, timings = seconds, 1
        self._doubted.discard(tokens)
        mean += max(1 / timings, 1 / _COUNTED) * (seconds - mean)
        self._widths[tokens] = _Width(mean, timings, self.observations)
        self._stale = True

    def seconds(self, tokens: int) -> float:
        """Expected seconds of a step that feeds `tokens` tokens per row."""
        return float(self.curve(tokens)[-1])

    def timed(self, tokens: int) -> float | None:
        """Mean seconds of steps that fed just so many tokens per row; None where none did."""
        with self._lock:
            known = self._widths.get(tokens)
        return None if known is None else known.seconds

    def share(self, tokens: int) -> int:
        """The n of t(n) for a forward that fed so many tokens."""
        return tokens

    def part_of_each(self, rows: int) -> float:
        """The part of a step of so many rows, 2 at least, that each saves by ending earlier."""
        return 0.0

    def curve(self, max_tokens: int) -> Float64Array:
        """float64 [max_tokens]: t(1), …, t(max_tokens) in seconds, non-decreasing; read-only."""
        with self._lock:
            if self._stale or max_tokens > len(self._curve):
                self._refresh(max_tokens)
            return self._curve[:max_tokens]

    def _refresh(self, max_tokens: int) -> None:
        widths, means = self._held()
        widest = max(max_tokens, len(self._curve), *widths)
        sizes = np.arange(1, 1 + widest)
        if not widths:
            widths, means = [1], [1.0]
        slope = _SLOPE * means[0]
        if len(widths) > 1:
            slope = self._hope * max(0.0, means[-1] - means[0]) / (widths[-1] - widths[0])
        curve = np.interp(sizes, widths, means, left=_NARROWER * means[0])
        curve += slope * np.maximum(sizes - widths[-1], 0)
        self._curve = np.minimum.accumulate(curve[::-1])[::-1]
        self._stale = False

    def _held(self) -> tuple[list[int], list[float]]:
        """The widths that were fed, ascending, and their means; forgets what is old, or of moments
        in which the machine was busy."""
        widths: list[int] = []
        means: list[float] = []
        wider = math.inf
        for width in sorted(self._widths, reverse=True):
            known = self._widths[width]
            if known.last + _OLD <= self.observations:
                known = _Width(_AGED * known.seconds, known.timings, self.observations)
                self._widths[width] = known
            if known.seconds > _BUSY * wider:
                del self._widths[width]
            else:
                widths.append(width)
                means.append(known.seconds)
                wider = min(wider, known.seconds)
        return widths[::-1], means[::-1]


class CostView(CostModel):
    """A measured t(n) as one row sees it: other numbers are fed than the row's own n tokens.

    Args:
        cost: what was measured; it goes on learning.
        widths: ascending, the numbers that forwards are filled up to; what is wider than the last
            is fed as it is.
        rows: whose tokens are counted together, since they are fed without padding; each other row
            is fed one.
    """

    def __init__(self, cost: CostModel, widths: Sequence[int] = (), rows: int = 1):
        # Made in every step: what the base class would learn with takes longer than the rest.
        self._cost = cost
        self._rows = rows
        self.shared_width = rows - 1
        self._fed = partial(_fed, tuple(widths), rows)

    def timed(self, tokens: int) -> float | None:
        return self._cost.timed(int(self._fed(tokens)[-1]))

    def share(self, tokens: int) -> int:
        # Fewer are fed where a step that was priced packed had to be repeated otherwise.
        return 1 + max(0, tokens - self._rows)

    def part_of_each(self, rows: int) -> float:
        # Most of the numbers between were never fed. What is only hoped of one row saves nothing.
        alone = self._cost.timed(1) if self.shared_width else None
        part = 0.0 if alone is None else 1 - alone / self._cost.seconds(rows)
        return max(0.0, part) / (rows - 1)

    def curve(self, max_tokens: int) -> Float64Array:
        fed = self._fed(max_tokens)
        return self._cost.curve(int(fed[-1]))[fed - 1]


@lru_cache(maxsize=1024)
def _fed(widths: tuple[int, ...], rows: int, most: int) -> NDArray[np.int64]:
    """int64 [most]: what is fed for 1, …, `most` tokens of one row; see `CostView`."""
    tokens = rows + np.arange(most)
    filled = np.array([*widths, 0])
    place = np.searchsorted(filled[:-1], tokens)
    return np.where(place < len(widths), filled[place], tokens)
