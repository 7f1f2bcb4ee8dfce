"""Texts that the caller expects to come out: how much of them did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..structures.suffix_automaton import SuffixAutomaton
from ..token_tree import Int32Array

# Tokens in a row that an output must share with a text to be within it.
_JOINED = 3


def expected_ids(text: str | Sequence[int] | NDArray[np.integer], tokenizer: Any) -> Int32Array:
    """An expected text as int32 [n].

    Raises:
        TypeError: text without a tokenizer; ids that are no integers.
        ValueError: an id below 0, or above 2^31 − 1.
    """
    if isinstance(text, str):
        if tokenizer is None:
            raise TypeError("expected text: expected a tokenizer with it, got None")
        text = tokenizer(text, add_special_tokens=False).input_ids
    ids = np.asarray(text)
    if ids.size and ids.dtype.kind not in "iu":
        raise TypeError(f"expected text: expected a string or integer ids, got {ids.dtype}")
    if ids.ndim != 1 or (ids.size and not 0 <= ids.min() <= ids.max() < 2**31):
        raise ValueError(f"expected text: expected ids from 0 to 2^31 - 1, got {ids}")
    return ids.astype(np.int32)


class ExpectedTexts:
    """Where an output is in the texts that were expected of it. O(1) a token.

    The output may leave a text and join it again further on, at whichever place its last tokens
    have there.
    """

    def __init__(self, texts: Iterable[Int32Array]) -> None:
        automaton = SuffixAutomaton()
        for text in texts:
            automaton.extend(text)
            automaton.end_document()
        automaton.freeze()
        self._cursor = automaton.cursor()
        self._tokens = automaton.tokens()
        self._came = np.zeros(len(self._tokens), np.bool_)
        self._next = -1  # place of the token that comes next where the output is within a text

    def follow(self, token_ids: Iterable[int]) -> None:
        """The output went on with these tokens."""
        if not len(self._tokens):
            return
        for token in token_ids:
            joined = self._cursor.advance(int(token)) >= _JOINED
            if 0 <= self._next < len(self._tokens) and self._tokens[self._next] == token:
                self._came[self._next] = True
                self._next += 1
            elif joined:
                self._next = self._cursor.latest
                self._came[self._next - _JOINED : self._next] = True
            else:
                self._next = -1

    @property
    def accepted(self) -> int:
        """Tokens of the texts that came out."""
        return int(self._came.sum())

    @property
    def rejected(self) -> int:
        """Tokens of the texts that did not."""
        return int((self._tokens >= 0).sum()) - self.accepted
