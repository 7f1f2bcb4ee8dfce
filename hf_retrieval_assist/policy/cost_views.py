"""t(n) as a planner must see it where a forward feeds other numbers of tokens than are planned."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

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
        self._cost = cost
        self.observations = cost.observations

    @property
    def known(self) -> bool:
        return self._cost.known

    def curve(self, max_tokens: int) -> Float64Array:
        fed = self._fed(max_tokens)
        return self._cost.curve(int(fed[-1]))[fed - 1]

    def spread(self, max_tokens: int, reference: int) -> Float64Array:
        fed = self._fed(max_tokens)
        compared = int(self._fed(reference)[-1])
        return self._cost.spread(int(fed[-1]), compared)[fed - 1]

    def _fed(self, most: int) -> Sizes:
        """The tokens that are fed where 1, 2, …, `most` are planned."""
        raise NotImplementedError


class SteppedCost(CostView):
    """Of forwards that are filled up to one of a few widths.

    Args:
        cost: what was measured.
        widths: ascending; what is wider than the last is fed as it is.
    """

    def __init__(self, cost: CostModel, widths: Sequence[int]):
        super().__init__(cost)
        self._widths = tuple(widths)

    def _fed(self, most: int) -> Sizes:
        return _filled_up(self._widths, most)


@lru_cache(maxsize=1024)
def _filled_up(widths: tuple[int, ...], most: int) -> Sizes:
    """The next width of each of 1, 2, …, `most` tokens; their number where there is none."""
    tokens = np.arange(1, most + 1)
    place = np.searchsorted(widths, tokens)
    return np.where(place < len(widths), np.append(widths, 0)[place], tokens)


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
        # Fewer are fed where a step that was priced packed had to be repeated otherwise.
        return 1 + max(0, tokens - self._rows) // self._step

    def _fed(self, most: int) -> Sizes:
        return self._rows + self._step * np.arange(most)
