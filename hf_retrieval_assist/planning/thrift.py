"""Whether drafting earns its own time: where forwards are cheap, drafters are not always asked."""

from __future__ import annotations

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

    def affords(self) -> bool:
        """Whether to ask the drafters in the next step."""
        return self._credit is None or self._credit >= self._dearest

    def rest(self, plain: float) -> None:
        """Count a step of `plain` seconds in which nobody was asked."""
        assert self._credit is not None
        self._credit += _SHARES[self._fruitless] * plain

    def observe(self, plain: float, saved: float, spent: float) -> None:
        """Count a step with drafts.

        Args:
            plain: seconds of a step without drafts.
            saved: seconds that the accepted tokens save.
            spent: seconds of drafting, learning and verifying more than one token per row.
        """
        known = _CREDIT * plain if self._credit is None else self._credit
        self._credit = min(known + saved - spent, _MOST_CREDIT * plain)
        # One slow call says little.
        self._dearest += 0.2 * (min(spent, 4 * self._dearest or spent) - self._dearest)
        if saved > spent:
            self._fruitless = 0
        elif self._credit < self._dearest:
            self._credit = max(self._credit, -_CREDIT * plain)
            self._fruitless = min(self._fruitless + 1, len(_SHARES) - 1)
