"""The greatest of many logits, exactly, from a quarter of the bytes.

An output layer's weights are read in eight bits. What rounding has left out of a row of weights is
a vector of known norm, so that a logit lies within that norm times the norm of x of its
approximation (Cauchy-Schwarz). Only tokens whose upper bound reaches the greatest lower bound can
win; their logits alone are computed in full, by the kernel that would have computed them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from ...structures.draws import CERTAIN_DEPTH, CERTAIN_LEAD
from ...structures.scores import BLOCK_COLUMNS, Scores, peaks_of, reaching
from ...system.lazy import cached_property
from ...verification.largest import argmax_rows, host_scores
from .quantized import QuantizedWeight
from .skinny import PEAK_COLUMNS, chosen_linear, skinny_linear

__all__ = ["Sampling", "Screen", "Screened"]

# A row of weights or of x whose norm is greater, or a row of x whose norm is less, might overflow
# or underflow on the way; it is computed in full.
MOST_NORM = 2.0**60
LEAST_NORM = 1e-20
LEAST_MARGIN = 1e-30

# The whole layer is computed where more than this share of all tokens are candidates.
MOST_CANDIDATES = 1 / 16

# So many tokens that top-p or min-p removes are drawn before all logits are asked for; and of so
# many of the likeliest logits are computed where bounds of theirs do not tell what is removed.
MOST_DRAWS = 8
HEAD = 256

# What is subtracted is the logarithm of a number of at most 53 log 2; rounding takes less than this
# slack from its sum with a bound in float32.
MOST_NOISE = math.log(53 * math.log(2))
SLACK = 2.0**-12

Reaching: TypeAlias = Callable[
    [NDArray[np.float32], NDArray[np.float32], int],
    tuple[NDArray[np.int64], NDArray[np.float32]],
]
"""See :meth:`~...decoding.draws.KnownDraws.reaching`, of a draw."""

_Bounds: TypeAlias = tuple[torch.Tensor, float, torch.Tensor]


class Sampling(NamedTuple):
    """What a token is drawn from: softmax(logits / temperature), of which transformers' top-p and
    then its min-p keep the likeliest."""

    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0


PLAIN = Sampling()

assert PEAK_COLUMNS == BLOCK_COLUMNS


class Screen:
    """Finds which token an output layer without bias would choose, from its weights in eight bits.

    Results are those of :func:`skinny_linear` over all tokens, to the bit; the weights must be what
    was packed (see :class:`WeightCopies`).

    Args:
        weight: [tokens, depth], float32, bfloat16 or float16, dense on the CPU.
        packed: the same in eight bits.

    Raises:
        ValueError: the two have not the same shape.
    """

    def __init__(self, weight: torch.Tensor, packed: QuantizedWeight) -> None:
        if weight.shape != packed.shape:
            raise ValueError(f"packed: expected {list(weight.shape)}, got {list(packed.shape)}")
        self.weight = weight.detach()
        self.packed = packed
        # Bounds for a row of x of norm 1.
        self.bounds, self.most_bound, self.unknown = _bounds_of(packed)
        self._known = self.bounds.numpy(), peaks_of(self.bounds.numpy())
        info = torch.finfo(weight.dtype)
        # Numbers that are less by so much round to less, in that dtype and in float32.
        self._rounding = info.max, 4 * info.eps, 2 * info.smallest_normal + LEAST_MARGIN

    def reaching(
        self, near: NDArray[np.float32], peaks: NDArray[np.float32], norm: float, count: int
    ) -> NDArray[np.int64]:
        """The tokens that may be among the greatest by approximate logits, float32 [tokens], of
        which each block's greatest is known."""
        found: NDArray[np.int64] = reaching(near, peaks, *self._known, norm, count, *self._rounding)
        return found

    def look(self, x: torch.Tensor) -> Screened:
        """What eight bits tell of rows of x, [n, depth] of the weight's dtype."""
        return Screened(self, x)


class Screened:
    """Rows of x before an output layer; of each, the logits that matter can be asked for.

    Attributes:
        near: float32 [n, tokens], approximate logits; what is not known to be finite is 0.
    """

    def __init__(self, screen: Screen, x: torch.Tensor) -> None:
        self._screen = screen
        self._x = x
        peaks = x.new_empty((len(x), -(-len(screen.weight) // BLOCK_COLUMNS)), dtype=torch.float32)
        self.near = screen.packed(x.float(), peaks=peaks)
        self._table, self._peaks = self.near.numpy(), peaks.numpy()
        if len(screen.unknown):
            self.near[:, screen.unknown] = 0.0
            self._peaks = np.stack([peaks_of(row) for row in self._table])
        # Rounded up.
        norms = torch.linalg.vector_norm(x, dim=1, dtype=torch.float64).tolist()
        self._norms = [norm * (1 + 2.0**-20) for norm in norms]

    @cached_property
    def scores(self) -> Scores:
        """The approximate logits, as they lie."""
        found = host_scores(self.near, self._peaks)
        assert found is not None
        return found

    def whole(self, row: int) -> torch.Tensor:
        """All logits of a row, [tokens] of x's dtype."""
        return skinny_linear(self._x[row], self._screen.weight)

    def logits(
        self, row: int, also: torch.Tensor | None = None, count: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens that may be among the greatest of a row.

        Args:
            also: int64 [m], tokens whose logits somebody is going to change: they are among those
                returned, and the others are those that may be the greatest without them.
            count: how many of the greatest, equals of the last one included.

        Returns:
            token ids in ascending order, int64, and their logits in x's dtype.
        """
        ids = self._candidates(row, also, count)
        if ids is None:
            return torch.arange(self.near.shape[1]), self.whole(row)
        return torch.from_numpy(ids), self._some(row, ids)

    def argmax(self, row: int) -> int:
        """The first token of the greatest logit of a row.

        As `torch.argmax` of all logits would, it takes a NaN for the greatest.
        """
        ids = self._candidates(row)
        if ids is None:
            return int(argmax_rows(self.whole(row)[None]))
        if len(ids) == 1:
            return int(ids[0])
        found = host_scores(self._some(row, ids))
        assert found is not None
        return int(ids[found.argmax(0)])

    def _candidates(
        self, row: int, also: torch.Tensor | None = None, count: int = 1
    ) -> NDArray[np.int64] | None:
        """The tokens that :meth:`logits` is to tell of; None: all."""
        screen, near, norm = self._screen, self._table[row], self._norms[row]
        count += len(screen.unknown)
        lacking = 0 if also is None else len(also)
        if not LEAST_NORM < norm < MOST_NORM or count + lacking >= len(near):
            return None
        if lacking:
            near = near.copy()
            near[also] = -np.finfo(np.float32).max
        peaks = peaks_of(near) if lacking else self._peaks[row]
        ids = screen.reaching(near, peaks, norm * (1 + 2.0**-20), count)
        if lacking or len(screen.unknown):
            ids = np.unique(
                np.concatenate([ids, screen.unknown, *([] if also is None else [also])])
            )
        return None if len(ids) > MOST_CANDIDATES * len(near) else ids

    def _some(self, row: int, ids: NDArray[np.int64]) -> torch.Tensor:
        """The logits of some tokens."""
        logits: torch.Tensor = chosen_linear(self._x[row], self._screen.weight, ids)
        return logits

    def draw(self, row: int, reaching: Reaching, sampling: Sampling = PLAIN) -> int | None:
        """The token of the greatest p / noise, with p the probabilities of those that are kept.

        So `torch.multinomial` draws one token where the noise is what it takes from the generator.

        Args:
            reaching: knows the noise.
            sampling: its temperature is positive.

        Returns:
            None where all logits are needed, or rounding could decide between two tokens.

        Raises:
            ValueError: the temperature is not positive.
        """
        if not sampling.temperature > 0:
            raise ValueError(f"temperature: expected a positive number, got {sampling.temperature}")
        screen, norm = self._screen, self._norms[row]
        if not LEAST_NORM < norm < MOST_NORM or len(screen.unknown):
            return None
        near, norm = self.near[row], norm * (1 + 2.0**-20)
        # One that may overflow leaves no probability what it would be without.
        if not float(near.abs().amax()) + screen.most_bound * norm < torch.finfo(self._x.dtype).max:
            return None
        margins = screen.bounds * norm + LEAST_MARGIN
        return _Draw(self._x[row], screen.weight, near, margins, sampling).token(reaching)


class _Draw:
    """One draw from a row.

    Args:
        x, weight: the row, and what it is multiplied by.
        near, margins: float32 [tokens], approximate logits, and how far from them the true ones
            may be.

    Attributes:
        low, high: float32 [tokens], bounds of the logits as plain decoding divides them by the
            temperature; equal where they have been computed.
    """

    def __init__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        near: torch.Tensor,
        margins: torch.Tensor,
        sampling: Sampling,
    ) -> None:
        self._x, self._weight, self._sampling = x, weight, sampling
        # Min-p keeps what is no further below the greatest.
        self._floor = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
        # Rounding of the logit to its dtype, then of the lines below.
        spread = (margins + near.abs() * torch.finfo(x.dtype).eps) / sampling.temperature
        middle = near / sampling.temperature
        spread = spread * (1 + 2.0**-20) + middle.abs() * 2.0**-20
        self.low, self.high = middle - spread, middle + spread

    def token(self, reaching: Reaching) -> int | None:
        """See :meth:`Screened.draw`."""
        least, most = self.low - SLACK, self.high + SLACK
        if self._floor > -math.inf:
            removed = self.high < self.low.amax() + self._floor - CERTAIN_LEAD
            least[removed] = most[removed] = -math.inf
        for _ in range(MOST_DRAWS):
            ids, gains = reaching(least.numpy(), most.numpy(), 1)
            if not 0 < len(ids) <= MOST_CANDIDATES * len(least):
                return None
            first = self._first(ids, gains)
            kept = None if first is None else self._passes(first)
            if first is None or kept is None:
                return None
            if kept:
                return first
            least[first] = most[first] = -math.inf
        return None

    def _compute(self, ids: NDArray[np.int64]) -> torch.Tensor:
        """Logits divided by the temperature, float32, which are known from now on."""
        logits = chosen_linear(self._x, self._weight, ids).float()
        logits /= self._sampling.temperature
        self.low[ids] = self.high[ids] = logits
        return logits

    def _first(self, ids: NDArray[np.int64], gains: NDArray[np.float32]) -> int | None:
        """Which of the tokens has the greatest score; None where rounding could decide."""
        logits = self._compute(ids)
        best = (logits.double() + torch.from_numpy(gains).double()).topk(min(2, len(ids)))
        first = int(best.indices[0])
        lead = float(best.values[0] - best.values[-1]) if len(ids) > 1 else math.inf
        # No token's logit is further below the greatest, whose score is no greater.
        depth = float(gains[first]) + MOST_NOISE
        known = lead > CERTAIN_LEAD and depth < CERTAIN_DEPTH and bool(logits[first].isfinite())
        return int(ids[first]) if known else None

    def _passes(self, token: int) -> bool | None:
        """Whether top-p and min-p keep a token of known logit; None: it is not certain."""
        if self._sampling.top_p >= 1 and self._sampling.min_p <= 0:
            return True
        logit = float(self.low[token])
        kept = self._is_likely(logit)
        if kept is None:
            self._compute(self.high.topk(min(HEAD, len(self.high) // 16)).indices.numpy())
            kept = self._is_likely(logit)
        return kept

    def _is_likely(self, logit: float) -> bool | None:
        """Whether top-p and min-p keep a token of this logit, as far as bounds tell."""
        if int((self.high >= logit).sum()) == 1:
            return True  # the greatest
        kept = self._in_nucleus(logit) if self._sampling.top_p < 1 else True
        if kept is False or logit - float(self.low.amax()) < self._floor - CERTAIN_LEAD:
            return False
        return kept if logit - float(self.high.amax()) > self._floor + CERTAIN_LEAD else None

    def _in_nucleus(self, logit: float) -> bool | None:
        """Whether a token of this logit and all that are less likely have together more than
        1 - top_p, as far as bounds tell."""
        shift = float(self.high.amax())
        least, most = (self.low - shift).exp_(), (self.high - shift).exp_()
        # That sums of softmax, and of what is up to a token, are rounded in whatever order.
        rounding = len(least) * 2.0**-23 + CERTAIN_LEAD
        own, left_out = math.exp(logit - shift), 1 - self._sampling.top_p
        below = self.high < logit
        share = _share(least * below, most * ~below, own)
        if share * (1 - rounding) > left_out:
            return True
        below = self.low <= logit
        if _share(most * below, least * ~below, 0.0) * (1 + rounding) <= left_out:
            return False
        return None


def _share(part: torch.Tensor, rest: torch.Tensor, moved: float) -> float:
    """What a part is of both, once so much has moved to it from the rest."""
    inner, total = float(part.sum()) + moved, float(part.sum()) + float(rest.sum())
    return inner / total if total > 0 else math.nan


_known_bounds: WeakKeyDictionary[QuantizedWeight, _Bounds] = WeakKeyDictionary()


def _bounds_of(packed: QuantizedWeight) -> _Bounds:
    """How far logits may lie from their approximations, float32 [tokens], for x of norm 1; the
    greatest of these; int64 [m], the tokens of which nothing is known, whose bounds are 0."""
    known = _known_bounds.get(packed)
    if known is not None:
        return known
    # What rounding x to 14 bits adds to an approximation, and summing in float32 to both.
    rounding = 1.01 * math.sqrt(packed.depth) / 16382 + (2 * packed.depth + 64) * 2.0**-24
    bounds = packed.left_out + rounding * (packed.norms + packed.left_out)
    unfit = ~(packed.norms < MOST_NORM)
    bounds = (bounds * (1 + 2.0**-20)).masked_fill_(unfit, 0.0)
    most = float(bounds.max()) if len(bounds) else 0.0
    known = _known_bounds[packed] = bounds, most, unfit.nonzero()[:, 0]
    return known
