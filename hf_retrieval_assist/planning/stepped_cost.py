"""t(n) of forwards that are filled up to one of a few widths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .cost_model import CostModel, Float64Array


class SteppedCost(CostModel):
    """A measured t(n) as a planner must see it where n tokens cost what the next width costs.

    Args:
        cost: what was measured; it goes on learning.
        widths: ascending; what is wider than the last is fed as it is.
    """

    def __init__(self, cost: CostModel, widths: Sequence[int]):
        super().__init__(cost.device_type)
        self._cost = cost
        self._widths = np.asarray(widths)

    @property
    def observations(self) -> int:
        return self._cost.observations

    @property
    def timed(self) -> bool:
        return self._cost.timed

    def curve(self, max_tokens: int) -> Float64Array:
        filled = self._filled(np.arange(1, max_tokens + 1))
        return self._cost.curve(int(filled[-1]))[filled - 1]

    def spread(self, max_tokens: int, reference: int) -> Float64Array:
        filled = self._filled(np.arange(1, max_tokens + 1))
        compared = int(self._filled(np.array([reference]))[0])
        return self._cost.spread(int(filled[-1]), compared)[filled - 1]

    def overhead(self) -> float:
        return self._cost.overhead()

    def _filled(self, tokens: np.ndarray) -> np.ndarray:
        place = np.searchsorted(self._widths, tokens)
        wider = np.append(self._widths, 0)[place]
        return np.where(place < len(self._widths), wider, tokens)


def stepped(cost: CostModel, widths: Sequence[int]) -> CostModel:
    """`cost` as it is where forwards are not filled up."""
    return SteppedCost(cost, widths) if len(widths) else cost
