"""The target's own forwards behind the texts of a call, for a drafter that runs the target itself.

What is drafted so is written into the call's cache behind the slots that each row keeps, as drafts
that are verified are, and is forgotten before the next verification writes there. So there is no
second prefill and no second cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ..types.row_text import RowText
from .tree_verifier import TreeVerifier
from .verifier import Verifier


class TargetForwards:
    """The forwards of one call; ready after its prefill.

    Attributes:
        verifier: of the call, whose cache they write to; None before its prefill, and where it
            lends none.
    """

    def __init__(self) -> None:
        self.verifier: TreeVerifier | None = None
        self._rows: Sequence[RowText] = ()
        self._deepest: Callable[[RowText], int | None] = lambda row: None

    def begin(
        self, verifier: Verifier, rows: Sequence[RowText], deepest: Callable[[RowText], int | None]
    ) -> None:
        """Draft for rows, in a verifier's cache.

        Args:
            rows: all of the call's.
            deepest: how deep a tree of a row may be; None without limit.
        """
        self._deepest = deepest
        if isinstance(verifier, TreeVerifier) and verifier.lends_cache:
            self.verifier, self._rows = verifier, rows

    @property
    def ready(self) -> bool:
        """Whether the call verifies token trees one kernel at a time, and has begun to."""
        return self.verifier is not None

    def last(self, row: int) -> int:
        """The last token of a row's text, by its number in the batch, with which a draft begins."""
        return self._rows[row].last

    def deepest(self, row: int) -> int | None:
        """How deep a tree of a row may be, by its number in the batch; None without limit."""
        return self._deepest(self._rows[row])

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Scope of one draft of all rows, at whose end what was fed is forgotten."""
        assert self.verifier is not None
        slots = self.verifier.cache.slots
        lengths = slots.lengths
        try:
            yield
        finally:
            slots.set_lengths(lengths)
            self.verifier.clear_draft()

    def feed_again(self, most: int, vocab_size: int) -> None:
        """One forward of the texts' last tokens behind the texts, so many of all rows at most, and
        none up to a placeholder that is no token of the vocabulary."""
        assert self.verifier is not None
        count = max(1, min(most // len(self._rows), self.verifier.most_fed))
        texts = [row.ids[0, -count:].tolist() for row in self._rows]
        for row, ids in zip(self._rows, texts, strict=True):
            room, odd = self._deepest(row), [not 0 <= token < vocab_size for token in ids]
            count = min(count, len(ids) if room is None else 1 + room)
            count = min(count, odd[::-1].index(True) if True in odd else len(ids))
        self.verifier.feed_again([ids[-count:] for ids in texts])
