"""t(n) as a planner must see it where a forward feeds other numbers of tokens than are planned."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .cost_model import CostModel, Float64Array

Sizes = NDArray[np.integer]


class CostView(CostModel):
    """A measured t(n), looked up at the tokens that a forward feeds.

    Args:
        cost: what was measured; it goes on learning.
    """

    def __init__(self, cost: CostModel):
        # Made in every step: what the base class would learn with takes longer than the rest.
        self.device_type = cost.device_type
        self._cost = cost

    @property
    def observations(self) -> int:
        return self._cost.observations

    @property
    def timed(self) -> bool:
        return self._cost.timed

    def curve(self, max_tokens: int) -> Float64Array:
        fed = self._fed(np.arange(1, max_tokens + 1))
        return self._cost.curve(int(fed[-1]))[fed - 1]

    def spread(self, max_tokens: int, reference: int) -> Float64Array:
        fed = self._fed(np.arange(1, max_tokens + 1))
        compared = int(self._fed(np.array([reference]))[0])
        return self._cost.spread(int(fed[-1]), compared)[fed - 1]

    def overhead(self) -> float:
        return self._cost.overhead()

    def _fed(self, tokens: Sizes) -> Sizes:
        """The tokens that are fed where so many, in ascending order, are planned."""
        raise NotImplementedError


class SteppedCost(CostView):
    """Of forwards that are filled up to one of a few widths.

    Args:
        cost: what was measured.
        widths: ascending; what is wider than the last is fed as it is.
    """

    def __init__(self, cost: CostModel, widths: Sequence[int]):
        super().__init__(cost)
        self._widths = np.asarray(widths)

    def _fed(self, tokens: Sizes) -> Sizes:
        place = np.searchsorted(self._widths, tokens)
        wider = np.append(self._widths, 0)[place]
        return np.where(place < len(self._widths), wider, tokens)


def stepped(cost: CostModel, widths: Sequence[int]) -> CostModel:
    """`cost` as it is where forwards are not filled up."""
    return SteppedCost(cost, widths) if len(widths) else cost


class PackedCost(CostView):
    """Of forwards over the rows of a batch without padding, for the tokens of one row.

    Args:
        cost: what was measured, t(n) for n tokens of all rows together.
        rows: that are running.
        alike: whether every other row is fed as many tokens; otherwise each is fed one.
    """

    def __init__(self, cost: CostModel, rows: int, alike: bool = False):
        super().__init__(cost)
        self._rows = rows
        self._step = rows if alike else 1
        self.company = 0 if alike else rows - 1

    def share(self, tokens: int) -> int:
        return 1 + (tokens - self._rows) // self._step

    def _fed(self, tokens: Sizes) -> Sizes:
        return self._rows + self._step * (tokens - 1)
