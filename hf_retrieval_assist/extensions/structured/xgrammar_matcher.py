"""xgrammar's matchers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xgrammar

from .constraint import Constraint


def constraint_of(processor: Any, row: int) -> Constraint | None:
    """The constraint of xgrammar's own processor, or of outlines' one over it."""
    grammars = getattr(processor, "compiled_grammars", None)
    if grammars is None:
        grammars = getattr(processor, "compiled_grammar", None)
    grammars = grammars if isinstance(grammars, list) else [grammars]
    # Too few for the batch's rows are for the processor to complain about.
    own = grammars[row:][:1] if len(grammars) > 1 else grammars
    if not own or not isinstance(own[0], xgrammar.CompiledGrammar):
        return None
    return XGrammarConstraint(own[0])


class XGrammarConstraint(Constraint):
    """Follows a compiled grammar."""

    def __init__(self, grammar: xgrammar.CompiledGrammar):
        self._matcher = xgrammar.GrammarMatcher(grammar)
        self._info = grammar.tokenizer_info
        self._mask = xgrammar.allocate_token_bitmask(1, self._info.vocab_size)
        self._texts: Sequence[bytes] | None = None

    def advance(self, token: int) -> bool:
        return not self._matcher.is_terminated() and self._matcher.accept_token(token)

    def rollback(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)

    def forced(self, limit: int) -> list[list[int]]:
        if self._matcher.is_terminated():
            return []
        left = self._matcher.find_jump_forward_string().encode()
        tokens: list[list[int]] = []
        while left and len(tokens) < limit:
            fitting = self._fitting(left)
            if not fitting or not self._matcher.accept_token(fitting[0]):
                break
            tokens.append(fitting)
            left = left[len(self._text_of(fitting[0])) :]
        self.rollback(len(tokens))
        return tokens

    def _fitting(self, text: bytes) -> list[int]:
        """The legal tokens that the text begins with, the longest first."""
        self._matcher.fill_next_token_bitmask(self._mask)
        bits = np.unpackbits(self._mask[0].numpy().view(np.uint8), bitorder="little")
        # The last one of tokens that spell the same: bytes, which stand in front, spell what has
        # no token of its own.
        fitting = {
            len(self._text_of(token)): token
            for token in np.flatnonzero(bits[: self._info.vocab_size]).tolist()
            if self._text_of(token) and text.startswith(self._text_of(token))
        }
        return [fitting[length] for length in sorted(fitting, reverse=True)]

    def _text_of(self, token: int) -> bytes:
        if self._texts is None:
            # The public list is made anew for every grammar, which takes a second for a large
            # vocabulary. What it is made of takes milliseconds, where it can be had.
            array = getattr(getattr(self._info, "_handle", None), "decoded_vocab", None)
            self._texts = array() if callable(array) else self._info.decoded_vocab
        return self._texts[token]
