"""The greatest of many logits, exactly, from a quarter of the bytes.

An output layer's weights are read in eight bits. What rounding has left out of a row of weights is
a vector of known norm, so that a logit lies within that norm times the norm of x of its
approximation (Cauchy-Schwarz). Only tokens whose upper bound reaches the greatest lower bound can
win; their logits alone are computed in full, by the kernel that would have computed them all.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ...structures.scores import Scores, peaks_of, reaching
from ...system.lazy import cached_property
from ...verification.largest import argmax_rows, host_scores
from .quantized import MOST_NORM, QuantizedWeight
from .skinny import product, skinny_linear

# A row of x whose norm is less might underflow on the way; it is computed in full.
LEAST_NORM = 1e-20
LEAST_MARGIN = 1e-30

# The whole layer is computed where more than this share of all tokens are candidates.
MOST_CANDIDATES = 1 / 16

NO_TOKENS = torch.empty(0, dtype=torch.int64)


class Screen:
    """Finds which token an output layer without bias would choose, from its weights in eight bits.

    Results are those of :func:`skinny_linear` over all tokens, to the bit; the weights must be what
    was packed (see :class:`WeightCopies`).

    Args:
        weight: [tokens, depth], float32, bfloat16 or float16, dense on the CPU.
        packed: the same in eight bits.
    """

    def __init__(self, weight: torch.Tensor, packed: QuantizedWeight) -> None:
        self.weight = weight.detach()
        self.packed = packed
        # Bounds for a row of x of norm 1.
        bounds, self.unknown = packed.bounds
        self._known = bounds.numpy(), peaks_of(bounds.numpy())
        info = torch.finfo(weight.dtype)
        # Numbers that are less by so much round to less, in that dtype and in float32.
        self._rounding = info.max, 4 * info.eps, 2 * info.smallest_normal + LEAST_MARGIN

    def reaching(self, near: NDArray[np.float32], norm: float, count: int) -> NDArray[np.int64]:
        """The tokens that may be among the greatest by approximate logits, float32 [tokens]."""
        found: NDArray[np.int64] = reaching(near, *self._known, norm, count, *self._rounding)
        return found


class Screened:
    """Rows of x before an output layer; of each, the logits that matter can be asked for.

    Args:
        screen: the layer's.
        x: [n, depth] of the weight's dtype.

    Attributes:
        near: float32 [n, tokens], approximate logits; what is not known to be finite is 0.
    """

    def __init__(self, screen: Screen, x: torch.Tensor) -> None:
        self._screen = screen
        self._x = x
        self.near = product(x.float(), screen.packed.matrix)
        self._table = self.near.numpy()
        self.near[:, screen.unknown] = 0.0
        # Rounded up.
        norms = torch.linalg.vector_norm(x, dim=1, dtype=torch.float64).tolist()
        self._norms = [norm * (1 + 2.0**-20) for norm in norms]

    @cached_property
    def scores(self) -> Scores:
        """The approximate logits, as they lie."""
        found = host_scores(self.near)
        assert found is not None
        return found

    def whole(self, row: int) -> torch.Tensor:
        """All logits of a row, [tokens] of x's dtype."""
        return skinny_linear(self._x[row], self._screen.weight)

    def logits(
        self, row: int, also: torch.Tensor = NO_TOKENS, count: int = 1
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
        if ids is not None and len(ids) == 1:
            return int(ids[0])
        logits = self.whole(row) if ids is None else self._some(row, ids)
        best = int(argmax_rows(logits[None]))
        return best if ids is None else int(ids[best])

    def _candidates(
        self, row: int, also: torch.Tensor = NO_TOKENS, count: int = 1
    ) -> NDArray[np.int64] | None:
        """The tokens that :meth:`logits` is to tell of; None: all."""
        screen, near, norm = self._screen, self._table[row], self._norms[row]
        count += len(screen.unknown)
        if not LEAST_NORM < norm < MOST_NORM or count + len(also) >= len(near):
            return None
        if len(also):
            near = near.copy()
            near[also] = -np.finfo(np.float32).max
        ids = screen.reaching(near, norm * (1 + 2.0**-20), count)
        if len(also) or len(screen.unknown):
            ids = np.unique(np.concatenate([ids, screen.unknown, also]))
        return None if len(ids) > MOST_CANDIDATES * len(near) else ids

    def _some(self, row: int, ids: NDArray[np.int64]) -> torch.Tensor:
        """The logits of some tokens."""
        rows = self._screen.weight.index_select(0, torch.from_numpy(ids))
        logits: torch.Tensor = skinny_linear(self._x[row], rows)
        return logits
