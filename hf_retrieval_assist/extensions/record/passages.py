"""Where the tokens of a text stand in other texts, word for word."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...types.token_tree import Int32Array, NamedIds

LONGEST = 64  # tokens that are looked up on either side of one
FEWEST = 2  # tokens that a passage has: a single one stands anywhere
BESIDE = 12  # tokens that are shown in front of a passage, and behind it


@dataclass(frozen=True)
class Passage:
    """Drafted tokens in a row, and where they stand in a document, word for word.

    Attributes:
        call: number of the call in the record.
        row: of the batch.
        start, stop: of the row's generated tokens.
        name: of the document: "prompt", "this answer", or its own.
        place: where the first of the tokens stands in the document, counted in tokens.
        text: the passage, which may be longer than the tokens that were drafted; "" without a
            tokenizer.
        before, after: up to twelve tokens of the document beside it, as text.
        count: passages of this length that the documents have.
    """

    call: int
    row: int
    start: int
    stop: int
    name: str
    place: int
    text: str
    before: str
    after: str
    count: int

    @property
    def where(self) -> str:
        """The place in words."""
        document = "the prompt" if self.name == "prompt" else self.name
        return f"in {document}, token {self.place:,}"

    def __str__(self) -> str:
        others = f", one of {self.count:,}" if self.count > 1 else ""
        return f"{self.where}{others}: {self.before}[{self.text}]{self.after}"


@dataclass
class Run:
    """Tokens in a row that stand at one distance from their places.

    Attributes:
        start, stop: of the generated tokens.
        document: its number.
        apart: tokens from each one to its place in the document.
        span: of the longest passage round one of them, in the document.
        count: passages of that length.
    """

    start: int
    stop: int
    document: int
    apart: int
    span: tuple[int, int]
    count: int

    @property
    def length(self) -> int:
        return self.span[1] - self.span[0]

    def goes_on_with(self, other: Run) -> bool:
        beside = self.stop == other.start and self.document == other.document
        return beside and self.apart == other.apart


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
        self.names = [name or f"document {i}" for i, (name, _) in enumerate(documents, -2)]
        self._ids = [np.asarray(ids, np.int32) for _, ids in documents]
        end = np.array([-1], np.int32)
        self._joined = np.concatenate([part for ids in self._ids for part in (ids, end)])
        self._starts = np.cumsum([0, *(len(ids) + 1 for ids in self._ids)])

    def runs(self, tokens: Sequence[int]) -> list[Run]:
        """Where generated tokens stand, ascending; those that stand nowhere are left out."""
        runs: list[Run] = []
        for found in filter(None, map(self._found, tokens)):
            if runs and (last := runs[-1]).goes_on_with(found):
                longest = max(last, found, key=lambda x: x.length)
                last.stop, last.span, last.count = found.stop, longest.span, longest.count
            else:
                runs.append(found)
        return runs

    def beside(self, run: Run) -> tuple[Int32Array, Int32Array, Int32Array]:
        """The tokens in front of a run's passage, its own, and those behind it."""
        ids, (start, stop) = self._ids[run.document], run.span
        return ids[max(0, start - BESIDE) : start], ids[start:stop], ids[stop : stop + BESIDE]

    def _found(self, token: int) -> Run | None:
        """The longest passage round a token; of equal ones the last."""
        here = self._prompt + token
        at = np.flatnonzero(self._joined == self._text[here])
        # The answer is known up to the token.
        own = int(self._starts[1])
        at = at[(at < own + token) | (at >= self._starts[2])]
        before, after = (self._alike(at, here, step) for step in (-1, 1))
        lengths = before + after + 1
        if not len(at) or lengths.max() < FEWEST:
            return None
        best = np.flatnonzero(lengths == lengths.max())
        place = int(at[best[-1]])
        document = int(np.searchsorted(self._starts, place, side="right")) - 1
        place -= int(self._starts[document])
        span = place - int(before[best[-1]]), place + int(after[best[-1]]) + 1
        return Run(token, token + 1, document, place - token, span, len(best))

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
