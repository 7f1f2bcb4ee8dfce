"""t(n): the measured time of a step that feeds n tokens, learnt from the loop's own steps.

A step is the forward, the walk and what the cache keeps; drafting is counted elsewhere.

The curve is kept as log t at a few knots, jointly Gaussian, and every timing is one Kalman update
of it: sizes that were never fed are inferred from their neighbours and from a prior shape, with an
uncertainty that tells the planner where a trial would teach something.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from ..structures import evidence
from ..system.locks import Lock

Float64Array = NDArray[np.float64]

# Powers of two, the sizes half way, and the first size past each power from 8 on: kernels change
# and tiles fill up there, so that a step of the curve falls between two knots that stand together.
KNOTS = np.array(
    (
        *(1, 2, 3, 4, 6, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256, 257),
        *(384, 512, 768, 1024, 2048),
    )
)
MAX_TOKENS = int(KNOTS[-1])

# t(n)/t(1) assumed before anything is measured: the kernels for few rows on two cores; a GPU.
_CPU_SIZES = np.array([1, 2, 4, 8, 16, 32, 64, 512, 2048])
_CPU_RATIOS = np.array([1, 1.05, 1.15, 1.4, 2.0, 3.4, 6.0, 40.0, 160.0])
_ACCELERATOR_SLOPE = 0.003

_LEVEL_STD = 1.0  # log t(1), once a first timing has set it
_CPU_OCTAVE_STD = 0.35  # the change of log t when n doubles
_ACCELERATOR_OCTAVE_STD = 0.2
_STEP_OCTAVES = 0.5  # variance of a step past a power of two, as that of so many octaves

_NOISE_STD = 0.1  # one timing's logarithm, until the timings tell
_MIN_NOISE_STD = 0.02
_NOISE_MEMORY = 0.05
_FIRST_NOISE = (256.0, 16.0, 4.0)  # times the variance: the first calls allocate and compile
_SURPRISE = 0.45  # log of slowness that a second timing of that size has to confirm
_OUTLIER = 3.0  # standard deviations
_OUTLIERS_OF_A_CHANGE = 3  # so many in a row on one side mean that the machine changed
_CHANGE_FORGETTING = 0.5
_ANYWHERE = len(KNOTS)
_FORGETTING = 0.01  # variance regained per timing, in units of a timing's own
_FORGETTING_PERIOD = 8
_BORROWED_VARIANCE = 0.02  # the least share of the prior variance


def _knot_positions() -> tuple[list[int], list[float]]:
    """The knot at or below every n, and the linear weight of the knot above."""
    n = np.arange(MAX_TOKENS + 1)
    left = np.clip(np.searchsorted(KNOTS, n, side="right") - 1, 0, len(KNOTS) - 2)
    weight = (n - KNOTS[left]) / (KNOTS[left + 1] - KNOTS[left])
    return left.tolist(), weight.tolist()


_LEFT, _WEIGHT = _knot_positions()


def _prior_mean(device_type: str) -> Float64Array:
    if device_type == "cpu":
        return np.log(np.interp(KNOTS, _CPU_SIZES, _CPU_RATIOS))
    return np.log1p(_ACCELERATOR_SLOPE * (KNOTS - 1))


def _prior_covariance(device_type: str) -> Float64Array:
    """That of log t at the knots: one unknown level, and a Brownian motion over the octaves."""
    steps = np.maximum(np.ceil(np.log2(KNOTS)) - 3, 0)  # powers of two from 8 on that lie below n
    octaves = np.log2(KNOTS) + _STEP_OCTAVES * steps
    std = _CPU_OCTAVE_STD if device_type == "cpu" else _ACCELERATOR_OCTAVE_STD
    return _LEVEL_STD**2 + std**2 * np.minimum.outer(octaves, octaves)


def _monotone(values: Float64Array) -> Float64Array:
    """The mean of the least non-decreasing majorant and the greatest non-decreasing minorant."""
    above = np.maximum.accumulate(values)
    above += np.minimum.accumulate(values[::-1])[::-1]
    above *= 0.5
    return above


class CostModel:
    """Learns t(n), the seconds of one step that feeds n tokens per row (the root included).

    Robust to outliers and to the first slow calls; forgets, so that it follows a curve that
    changes. Safe to share between threads. An observation and the next curve cost about 15 µs.

    Args:
        device_type: "cpu", or an accelerator's type: chooses the prior shape of t(n)/t(1).

    Attributes:
        shared_width: tokens of other rows that share the forward whose time t(n) is.
        observations: forwards timed so far.
        timed: whether a forward of its own was timed.
    """

    shared_width = 0

    def __init__(self, device_type: str = "cpu"):
        self._mean = _prior_mean(device_type)
        self._prior_covariance = _prior_covariance(device_type)
        self._covariance = self._prior_covariance.copy()
        self._noise = _NOISE_STD**2
        self.observations = 0
        self.timed = False
        self._surprised = [False] * len(KNOTS)
        self._outliers = [0] * (len(KNOTS) + 1)  # each knot's, then anywhere; signed by side
        self._curve: Float64Array = np.empty(0)
        self._stale = True
        self._lock = Lock()

    @classmethod
    def fixed(cls, seconds: Callable[[int], float]) -> CostModel:
        """A model of a known t(n), `seconds(n)`, that learns nothing: for simulations."""
        return _FixedCostModel(seconds)

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from a step that fed `tokens` tokens per row, or of all packed rows.

        Sizes beyond `MAX_TOKENS` and clocks that stood still teach nothing.
        """
        if tokens < 1:
            raise ValueError(f"tokens: expected at least 1, got {tokens}")
        if tokens <= MAX_TOKENS and seconds > 0:
            with self._lock:
                self._update(_LEFT[tokens], _WEIGHT[tokens], math.log(seconds))

    def _update(self, left: int, weight: float, log_seconds: float) -> None:
        """One robust Kalman step for a timing of `1 − weight` at a knot, `weight` at the next."""
        covariance, mean = self._covariance, self._mean
        predicted, variance = evidence.estimated(mean, covariance, left, weight)
        if self.observations == 0:
            mean += log_seconds - predicted
            predicted = log_seconds
        error = log_seconds - predicted
        known = self.observations
        self.observations += 1
        self.timed = True
        if self._set_aside(left, error):
            return
        noise = self._noise * (_FIRST_NOISE[known] if known < len(_FIRST_NOISE) else 1)
        limit = _OUTLIER * math.sqrt(variance + noise)
        believed = min(max(error, -limit), limit)
        evidence.correct(mean, covariance, left, weight, believed, variance + noise)
        self._learn_noise(believed, variance)
        self._age(left, error - believed)
        self._stale = True

    def _set_aside(self, left: int, error: float) -> bool:
        """Whether a timing is so slow that it may well be an outlier, and the first such one here.

        A size that was never fed would take it for the truth, and not be fed again.
        """
        slow = self.observations > len(_FIRST_NOISE) and error > _SURPRISE
        self._surprised[left] = slow and not self._surprised[left]
        return self._surprised[left]

    def _learn_noise(self, error: float, variance: float) -> None:
        """Move the noise towards the share of the squared error that the curve does not explain."""
        if self.observations > len(_FIRST_NOISE):
            unexplained = min(error * error / (1 + variance / self._noise), 4 * self._noise)
            noise = self._noise + _NOISE_MEMORY * (unexplained - self._noise)
            self._noise = max(noise, _MIN_NOISE_STD**2)

    def _age(self, left: int, disbelieved: float) -> None:
        """Forget a little, and much where outliers on one side say that the machine changed."""
        if self.observations % _FORGETTING_PERIOD == 0:
            self._inflate(_FORGETTING * _FORGETTING_PERIOD * self._noise / _LEVEL_STD**2)
        side = (disbelieved > 0) - (disbelieved < 0)
        changed = False
        for place in (left, _ANYWHERE):
            run = self._outliers[place]
            run = (run + side if run * side >= 0 else side) if side else 0
            # Too long for chance.
            long = abs(run) >= _OUTLIERS_OF_A_CHANGE
            self._outliers[place] = 0 if long else run
            changed |= long
        if changed:
            self._inflate(_CHANGE_FORGETTING)

    def _inflate(self, share: float) -> None:
        """Move the uncertainty towards the prior's."""
        self._covariance += min(share, 1.0) * (self._prior_covariance - self._covariance)

    @property
    def known(self) -> bool:
        """Whether its seconds are more than a shape: a forward like these was timed."""
        return self.observations > 0

    def seconds(self, tokens: int) -> float:
        """Expected seconds of a step that feeds `tokens` tokens per row."""
        return float(self.curve(tokens)[-1])

    def share(self, tokens: int) -> int:
        """The n of t(n) for a forward that fed so many tokens."""
        return tokens

    def curve(self, max_tokens: int) -> Float64Array:
        """float64 [max_tokens]: t(1), …, t(max_tokens) in seconds, non-decreasing; read-only."""
        with self._lock:
            if self._stale or max_tokens > len(self._curve):
                self._refresh(max_tokens)
            return self._curve[:max_tokens]

    def spread(self, max_tokens: int, reference: int) -> Float64Array:
        """float64 [max_tokens]: standard deviation of the estimates of log t(n)/t(reference)."""
        size = min(reference, MAX_TOKENS)
        left, weight = _LEFT[size], _WEIGHT[size]
        with self._lock:
            covariance = self._covariance
            row = (1 - weight) * covariance[left] + weight * covariance[left + 1]
            variance = covariance.diagonal() - 2 * row
        variance += (1 - weight) * row[left] + weight * row[left + 1]
        return np.sqrt(np.interp(np.arange(1, max_tokens + 1), KNOTS, np.maximum(variance, 0)))

    def _refresh(self, max_tokens: int) -> None:
        sizes = np.arange(1, 1 + max(max_tokens, len(self._curve)))
        at_knots = np.exp(_monotone(self._mean))
        self._curve = np.interp(sizes, KNOTS, at_knots)
        if len(sizes) > MAX_TOKENS:
            slope = (at_knots[-1] - at_knots[-2]) / (KNOTS[-1] - KNOTS[-2])
            self._curve[MAX_TOKENS:] += slope * (sizes[MAX_TOKENS:] - MAX_TOKENS)
        self._stale = False

    def start_from(self, other: CostModel) -> None:
        """Start from what a similar model knows, trusting it less than its own timings, until a
        forward of its own is timed."""
        with other._lock:
            mean, noise, observations = other._mean.copy(), other._noise, other.observations
            uncertainty = other._covariance.diagonal() / other._prior_covariance.diagonal()
        std = np.sqrt(uncertainty.clip(_BORROWED_VARIANCE, 1))
        with self._lock:
            self._mean, self._noise, self.observations = mean, noise, observations
            self._covariance = np.outer(std, std) * self._prior_covariance
            self._stale = True


class _FixedCostModel(CostModel):
    """A known t(n); see `CostModel.fixed`."""

    known = True

    def __init__(self, seconds: Callable[[int], float]):
        super().__init__()
        self._seconds = seconds
        self._stale = False

    def _update(self, left: int, weight: float, log_seconds: float) -> None:
        pass

    def _refresh(self, max_tokens: int) -> None:
        new = range(len(self._curve) + 1, max_tokens + 1)
        self._curve = np.concatenate([self._curve, [float(self._seconds(n)) for n in new]])

    def spread(self, max_tokens: int, reference: int) -> Float64Array:
        return np.zeros(max_tokens)


class CostView(CostModel):
    """A measured t(n) as one row sees it: other numbers are fed than the row's own n tokens.

    Args:
        cost: what was measured; it goes on learning.
        widths: ascending, the numbers that forwards are filled up to; what is wider than the last
            is fed as it is.
        rows: whose tokens are counted together, since they are fed without padding.
        lockstep: whether every other row is fed as many tokens; otherwise each is fed one.
    """

    def __init__(
        self, cost: CostModel, widths: Sequence[int] = (), rows: int = 1, lockstep: bool = False
    ):
        # Made in every step: what the base class would learn with takes longer than the rest.
        self._cost = cost
        self._rows, self._step = rows, rows if lockstep else 1
        self.shared_width = rows - self._step
        self._fed = partial(_fed, tuple(widths), rows, self._step)

    @property
    def observations(self) -> int:  # type: ignore[override]
        return self._cost.observations

    @property
    def known(self) -> bool:
        return self._cost.known

    def share(self, tokens: int) -> int:
        # Fewer are fed where a step that was priced packed had to be repeated otherwise.
        return 1 + max(0, tokens - self._rows) // self._step

    def curve(self, max_tokens: int) -> Float64Array:
        fed = self._fed(max_tokens)
        return self._cost.curve(int(fed[-1]))[fed - 1]

    def spread(self, max_tokens: int, reference: int) -> Float64Array:
        fed = self._fed(max_tokens)
        compared = int(self._fed(reference)[-1])
        return self._cost.spread(int(fed[-1]), compared)[fed - 1]


@lru_cache(maxsize=1024)
def _fed(widths: tuple[int, ...], rows: int, step: int, most: int) -> NDArray[np.int64]:
    """int64 [most]: what is fed for 1, …, `most` tokens of one row; see `CostView`."""
    tokens = rows + step * np.arange(most)
    filled = np.array([*widths, 0])
    place = np.searchsorted(filled[:-1], tokens)
    return np.where(place < len(widths), filled[place], tokens)
