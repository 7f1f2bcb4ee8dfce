"""Where the tokens of a text stand in other texts, word for word."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .token_tree import Int32Array, NamedIds

LONGEST = 64
"""Tokens that are looked up on either side of one."""

FEWEST = 2
"""Tokens that a passage has: a single one stands anywhere."""

BESIDE = 12
"""Tokens that are shown in front of a passage, and behind it."""


@dataclass(frozen=True, eq=False)
class Place:
    """The longest passage round a token that a source has.

    Attributes:
        name: of the document.
        document: its number in the source.
        token: where the token stands in the document, counted in tokens.
        start: where the passage begins in the document.
        token_ids: int32 [n], the passage.
        before, after: int32, at most `BESIDE` tokens of the document beside it.
        count: passages of this length that the source has.
    """

    name: str
    document: int
    token: int
    start: int
    token_ids: Int32Array
    before: Int32Array
    after: Int32Array
    count: int


class Source(ABC):
    """Texts that drafts come from."""

    @abstractmethod
    def places(self, text: Int32Array, tokens: Sequence[int]) -> list[Place | None]:
        """Where tokens of a text stand in this source, ascending indices into int32 [length]: the
        longest passage round each, of `FEWEST` to 2 x `LONGEST` + 1 tokens; None: there is none.
        """


class Documents(Source):
    """Texts in memory. O(their length) for each token that is looked up."""

    @abstractmethod
    def documents(self, text: Int32Array) -> Iterable[NamedIds]:
        """The documents, those of the text that is looked up among them, in their order."""

    def known(self, length: int, text: Int32Array, token: int) -> int:
        """How many of the documents' tokens, joined to so many, a token may stand among."""
        return length

    def places(self, text: Int32Array, tokens: Sequence[int]) -> list[Place | None]:
        documents = [*self.documents(text)]
        if not documents:
            return [None] * len(tokens)
        end = np.array([-1], np.int32)
        joined = np.concatenate([part for one in documents for part in (one.token_ids, end)])
        starts = np.cumsum([0, *(len(one.token_ids) + 1 for one in documents)])
        found: list[Place | None] = []
        for token in tokens:
            at = np.flatnonzero(joined[: self.known(len(joined), text, token)] == text[token])
            before, after = (_alike(joined, at, text, token, step) for step in (-1, 1))
            lengths = before + after + 1
            if not len(at) or lengths.max() < FEWEST:
                found.append(None)
                continue
            best = np.flatnonzero(lengths == lengths.max())
            place = int(at[best[-1]])
            number = int(np.searchsorted(starts, place, side="right")) - 1
            own = place - int(starts[number])
            span = own - int(before[best[-1]]), own + int(after[best[-1]]) + 1
            found.append(place_in(documents[number], number, own, span, len(best)))
        return found


def place_in(
    document: NamedIds, number: int, token: int, span: tuple[int, int], count: int, first: int = 0
) -> Place:
    """A place in a document, or in what is known of it from its token `first` on."""
    ids, (start, stop) = np.asarray(document.token_ids), span
    return Place(
        document.name,
        number,
        first + token,
        first + start,
        ids[start:stop],
        ids[max(0, start - BESIDE) : start],
        ids[stop : stop + BESIDE],
        count,
    )


def _alike(
    joined: Int32Array, at: NDArray[np.int64], text: Int32Array, token: int, step: int
) -> NDArray[np.int64]:
    """int64 [n]: how many tokens beside each of the places are those beside the token, going on
    by `step`."""
    lengths = np.zeros(len(at), np.int64)
    alive = np.arange(len(at))
    for n in range(1, LONGEST + 1):
        here, there = token + step * n, at[alive] + step * n
        if not (len(alive) and 0 <= here < len(text)):
            break
        inside = (there >= 0) & (there < len(joined))
        alive = alive[inside & (joined[there.clip(0, len(joined) - 1)] == text[here])]
        lengths[alive] = n
    return lengths


class OwnText(Documents):
    """The text itself up to each token, and what was expected of it.

    Args:
        expected: int32 [n] each.
        prompt: tokens of the prompt.
    """

    def __init__(self, expected: Sequence[Int32Array], prompt: int) -> None:
        self._expected, self._prompt = expected, prompt

    def documents(self, text: Int32Array) -> Iterable[NamedIds]:
        for number, ids in enumerate(self._expected, 1):
            yield NamedIds(f"expected text {number}", ids)
        yield NamedIds("prompt", text[: self._prompt])
        yield NamedIds("this answer", text[self._prompt :])

    def known(self, length: int, text: Int32Array, token: int) -> int:
        return length - 1 - (len(text) - token)
