"""outlines-core's guides, which are automata over whole tokens."""

from __future__ import annotations

from typing import Any

from outlines_core import Guide, Index

from .constraint import DEEPEST, Constraint


def constraint_of(processor: Any, row: int) -> Constraint | None:
    """The constraint of a processor that holds an index."""
    index = getattr(processor, "index", None)
    return OutlinesConstraint(Guide(index, DEEPEST)) if isinstance(index, Index) else None


class OutlinesConstraint(Constraint):
    """An index does not tell what its tokens spell, so only a token without an alternative is
    forced."""

    def __init__(self, guide: Guide):
        self._guide = guide

    def advance(self, token: int) -> bool:
        if not self._guide.accepts_tokens([token]):
            return False
        self._guide.advance(token, return_tokens=False)
        return True

    def rollback(self, count: int) -> None:
        if count:
            self._guide.rollback_state(count)

    def forced(self, limit: int) -> list[list[int]]:
        tokens: list[list[int]] = []
        while len(tokens) < limit:
            allowed = self._guide.get_tokens()
            if len(allowed) != 1 or not self.advance(allowed[0]):
                break
            tokens.append(allowed)
        self.rollback(len(tokens))
        return tokens
