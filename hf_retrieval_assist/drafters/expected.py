"""Texts that the caller expects to come out: how much of them did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..plugins import load
from ..structures.suffix_automaton import SuffixAutomaton
from ..system.arguments import encodable, require_several
from ..types.token_tree import Int32Array, checked_ids

Text: TypeAlias = "str | Sequence[int] | NDArray[np.integer]"

# Tokens in a row that an output must share with a text to be within it.
_JOINED = 3


def expected_ids(text: Text, tokenizer: Any) -> Int32Array:
    """An expected text as int32 [n]; raises what `checked_ids` does, and TypeError for text
    without a tokenizer."""
    if isinstance(text, str):
        if tokenizer is None:
            raise TypeError("expected text: expected a tokenizer with it, got None")
        text = tokenizer(encodable("expected text", text), add_special_tokens=False).input_ids
    return checked_ids("expected text", text)


@dataclass(frozen=True)
class Expected:
    """What a caller expects.

    Attributes:
        texts: int32 [n] each, in every row of a batch.
        rows: those of each row alone; of as many neighbours where a batch has several times as
            many rows.
        forms: to be filled in, in every row; None: none.
    """

    texts: tuple[Int32Array, ...] = ()
    rows: tuple[tuple[Int32Array, ...], ...] = ()
    forms: Any = None

    @classmethod
    def of(
        cls,
        texts: Sequence[Text],
        rows: Sequence[Sequence[Text]],
        tokenizer: Any,
        schema: Any = None,
        tools: Sequence[Any] = (),
    ) -> Expected:
        """See `Assistant.expecting`, which raises the same."""

        def all_ids(given: Sequence[Text]) -> tuple[Int32Array, ...]:
            require_several("rows", given, "a list of the texts of each row")
            return tuple(expected_ids(text, tokenizer) for text in given)

        require_several("rows", rows, "a list of the texts of each row")
        require_several("tools", tools, "a list of functions or JSON schemas")
        forms = None
        if schema is not None or tools:
            forms = load("parts", "forms")(schema, tools, tokenizer)
        return cls(all_ids(texts), tuple(map(all_ids, rows)), forms)

    def __bool__(self) -> bool:
        return bool(self.texts or self.rows or self.forms)

    def of_row(self, row: int, batch_size: int) -> tuple[Int32Array, ...]:
        """What one row expects.

        Raises:
            ValueError: a batch in which not every entry of `rows` stands for as many rows.
        """
        if not self.rows:
            return self.texts
        if batch_size % len(self.rows):
            raise ValueError(
                f"expecting: expected a multiple of {len(self.rows)} rows, got {batch_size}"
            )
        return self.texts + self.rows[row * len(self.rows) // batch_size]


class ExpectedTexts:
    """Where an output is in the texts that were expected of it. O(1) a token.

    The output may leave a text and join it again further on, at the first place that its last
    tokens have there.
    """

    def __init__(self, texts: Iterable[Int32Array]) -> None:
        automaton = SuffixAutomaton()
        for text in texts:
            automaton.extend(text)
            automaton.end_document()
        self._cursor = automaton.cursor()
        self._tokens = automaton.tokens()
        self.any = len(self._tokens) > 0  # whether there is something to follow
        self._came = np.zeros(len(self._tokens), np.bool_)
        self._next = -1  # place of the token that comes next where the output is within a text

    def follow(self, token_ids: Iterable[int]) -> None:
        """The output went on with these tokens."""
        if not self.any:
            return
        for token in token_ids:
            joined = self._cursor.advance(int(token)) >= _JOINED
            if 0 <= self._next < len(self._tokens) and self._tokens[self._next] == token:
                self._came[self._next] = True
                self._next += 1
            elif joined:
                self._next = self._cursor.earliest
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
