"""Where the tokens of a text stand in other texts, word for word."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from ...types.token_tree import Int32Array, NamedIds

LONGEST = 64  # tokens that are compared on either side of one
FEWEST = 2  # tokens that a passage has: a single one stands anywhere


@dataclass(frozen=True)
class Passage:
    """Drafted tokens in a row, and where they stand in a document, word for word.

    Attributes:
        call: number of the call in the record.
        row: of the batch.
        start, stop: of the row's generated tokens.
        name: of the document: "prompt", "this answer", or its own.
        place: where the first of the tokens stands in the document, counted in tokens.
        text: the tokens as text, as ids without a tokenizer.
    """

    call: int
    row: int
    start: int
    stop: int
    name: str
    place: int
    text: str

    def __str__(self) -> str:
        return f"in {self.name}, token {self.place:,}: {self.text}"


class Texts:
    """A prompt, the answer to it, and other documents. O(their length) a token that is looked up.

    Args:
        prompt, answer: int32 [n].
        others: further documents.
    """

    def __init__(
        self, prompt: Int32Array, answer: Int32Array, others: Iterable[NamedIds] = ()
    ) -> None:
        self._text, self._prompt = np.concatenate([prompt, answer]), len(prompt)
        documents = [NamedIds("prompt", prompt), NamedIds("this answer", answer), *others]
        self._names = [name or f"document {i}" for i, (name, _) in enumerate(documents, -2)]
        end = np.array([-1], np.int32)
        parts = [part for _, ids in documents for part in (np.asarray(ids, np.int32), end)]
        self._joined = np.concatenate(parts)
        self._starts = np.cumsum([0, *(len(ids) + 1 for _, ids in documents)])

    def places(self, tokens: Sequence[int]) -> Iterator[tuple[int, int, str, int]]:
        """(start, stop, name, place) of generated tokens, ascending, that stand in a row in a
        document; those that stand nowhere are left out."""
        found = [(token, place) for token in tokens if (place := self._place(token)) is not None]

        def run_of(numbered: tuple[int, tuple[int, int]]) -> tuple[int, int]:
            number, (token, place) = numbered
            return token - number, place - token

        for _, run in groupby(enumerate(found), run_of):
            pairs = [pair for _, pair in run]
            start, place = pairs[0]
            document = int(np.searchsorted(self._starts, place, side="right")) - 1
            place -= int(self._starts[document])
            yield start, start + len(pairs), self._names[document], place

    def _place(self, token: int) -> int | None:
        """Where the longest passage round a token has it, the last of equal ones."""
        here = self._prompt + token
        at = np.flatnonzero(self._joined == self._text[here])
        # The answer is known up to the token.
        own = int(self._starts[1])
        at = at[(at < own + token) | (at >= self._starts[2])]
        lengths = self._alike(at, here, -1) + self._alike(at, here, 1) + 1
        if not len(at) or lengths.max() < FEWEST:
            return None
        return int(at[np.flatnonzero(lengths == lengths.max())[-1]])

    def _alike(self, at: NDArray[np.int64], here: int, step: int) -> NDArray[np.int64]:
        """int64 [n]: how many tokens beside each of the places are those beside the token, going
        on by `step`."""
        joined, text = self._joined, self._text
        lengths, alive = np.zeros(len(at), np.int64), np.arange(len(at))
        for n in range(1, LONGEST + 1):
            one, there = here + step * n, at[alive] + step * n
            if not (len(alive) and 0 <= one < len(text)):
                break
            inside = (there >= 0) & (there < len(joined))
            alive = alive[inside & (joined[there.clip(0, len(joined) - 1)] == text[one])]
            lengths[alive] = n
        return lengths
