"""Whether drafting earns its own time: where forwards are cheap, drafters are not always asked."""

from __future__ import annotations

import math

from .cost_model import CostModel

_CREDIT = 4.0  # plain steps that drafting may lose before it has brought anything
_MOST_CREDIT = 8.0
_SHARES = (1 / 32, 1 / 64, 1 / 128)  # of the time spent that is lent for asking again


class Thrift:
    """An account of what drafting brought and took, in seconds.

    Every accepted token saves a share of a plain step; drafting, learning and the wider forward
    take time. While the account is in credit, drafters are asked. Once it is empty they are not,
    but a share of the time that passes is saved up for asking them again, since texts change: the
    pauses grow with the time that drafting takes, and each fruitless question halves the share.
    So drafting never loses more than the first credit and that share of the time.
    """

    def __init__(self) -> None:
        self._credit: float | None = None
        self._dearest = 0.0  # seconds that a question took lately
        self._fruitless = 0
        self._pause = 0  # steps until the next question

    def affords(self) -> bool:
        """Whether to ask the drafters in the next step; to be called once for each."""
        if self._pause == 0:
            return True
        self._pause -= 1
        return False

    def observe(self, cost: CostModel, width: int, brought: float, spent: float) -> None:
        """Count a step that asked.

        Args:
            cost: t(n), and what a step spends outside the forward.
            width: tokens per row that were verified.
            brought: tokens per row besides the one that a plain step brings.
            spent: seconds of drafting and learning.
        """
        plain = cost.seconds(1) + cost.overhead()
        known = _CREDIT * plain if self._credit is None else self._credit
        spent += cost.seconds(width) - cost.seconds(1)
        saved = brought * plain
        # One slow call says little.
        self._dearest += 0.2 * (min(spent, 4 * self._dearest or spent) - self._dearest)
        self._credit = min(max(known + saved - spent, -_CREDIT * plain), _MOST_CREDIT * plain)
        lacking = self._dearest - self._credit
        if saved > spent:
            self._fruitless = 0
        elif lacking > 0:
            self._fruitless = min(self._fruitless + 1, len(_SHARES) - 1)
        if lacking > 0:
            self._pause = math.ceil(lacking / (_SHARES[self._fruitless] * plain))
            self._credit = self._dearest
