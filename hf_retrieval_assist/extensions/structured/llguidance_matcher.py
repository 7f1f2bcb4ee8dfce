"""llguidance's matchers."""

from __future__ import annotations

from typing import Any

from llguidance import LLMatcher, LLTokenizer

from .constraint import Constraint


def constraint_of(processor: Any, row: int) -> Constraint | None:
    """The constraint of a processor that names its grammar and llguidance's tokenizer."""
    tokenizer = getattr(processor, "llg_tokenizer", None)
    grammar = getattr(processor, "grammar", None)
    if not isinstance(tokenizer, LLTokenizer) or not isinstance(grammar, str):
        return None
    matcher = LLMatcher(tokenizer, grammar)
    return None if matcher.is_error() else LLGuidanceConstraint(matcher)


class LLGuidanceConstraint(Constraint):
    def __init__(self, matcher: LLMatcher):
        self._matcher = matcher

    def advance(self, token: int) -> bool:
        return not self._matcher.is_stopped() and self._matcher.try_consume_tokens([token]) == 1

    def rollback(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)

    def forced(self, limit: int) -> list[list[int]]:
        tokens = [] if self._matcher.is_stopped() else self._matcher.compute_ff_tokens()[:limit]
        return [[token] for token in tokens]
