"""Texts that the caller expects to come out: how much of them did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..plugins import load
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


def came_out(texts: Sequence[Int32Array], output: Sequence[int]) -> tuple[int, int]:
    """How many tokens of expected texts came out, and how many did not. O(1) a token.

    Tokens came that stand in three or more in a row which the output has too; the output's tokens
    count once, so of a passage that a text repeats as many as the output does.
    """
    if not texts:
        return 0, 0
    left, came = Counter(_runs(output)), 0
    for text in texts:
        found = np.zeros(len(text), np.bool_)
        for place, run in enumerate(_runs(text.tolist())):
            if left[run] > 0:
                left[run] -= 1
                found[place : place + _JOINED] = True
        came += int(found.sum())
    return came, sum(map(len, texts)) - came


def _runs(ids: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All tokens in a row that an output must share with a text to be within it."""
    return zip(*(ids[first:] for first in range(_JOINED)), strict=False)
