"""What one forward over pending tokens and drafts showed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..structures.scores import Scores
from ..system.lazy import cached_property
from ..types.row_text import RowText
from .largest import argmax_rows, host_scores, largest

# Logits looked at together, so that a long prompt needs no large temporaries.
_CHUNK_CELLS = 1 << 25


class TopLogits:
    """The k largest logits of some tokens of a forward, and which tokens they are of.

    Args:
        logits: [m, vocab_size] of all tokens of the forward, in which they are found when asked
            for, a tensor or `Scores`; or, where they were found together with it, float32 [m, k] on
            the host.
        places: int64 [n], ascending, which of the m tokens; None: all.
        ids: int64 [m, k] on the host, what was found; None: nothing yet.

    Attributes:
        free: whether looking at many nodes takes no more time than looking at few.
    """

    def __init__(
        self,
        logits: Any,
        places: NDArray[np.int64] | None = None,
        ids: NDArray[np.int64] | None = None,
    ):
        self.logits, self._ids = logits, ids
        self._places = np.arange(len(logits)) if places is None else places
        # What was found last: of which places, in so many columns.
        self._known: tuple[NDArray[np.int64], int, Any] | None = None
        self.free = ids is not None
        if not self.free and isinstance(logits, torch.Tensor):
            self.free = logits.device.type != "cpu"

    def __len__(self) -> int:
        return len(self._places)

    def joined(self, others: Sequence[TopLogits]) -> TopLogits:
        """The tokens of this and of others of the same forward, behind one another."""
        if any(other.logits is not self.logits for other in others):
            raise ValueError("expected tokens of one forward")
        places = [self._places, *[other._places for other in others]]
        return TopLogits(self.logits, np.concatenate(places), self._ids)

    def of(
        self, nodes: NDArray[np.int64], k: int, vocab_size: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Token ids and logits [n, k] behind the given nodes (ascending), largest first.

        Columns from `vocab_size` on, which fill the logits up, are left out.
        """
        places = self._places[nodes]
        if self._ids is not None:
            return self._ids[places, :k].astype(np.int32), self.logits[places, :k]
        table = self.logits if isinstance(self.logits, Scores) else host_scores(self.logits)
        if table is not None:
            return self._of_table(table, places, k, min(vocab_size, table.columns))
        chunk = max(1, _CHUNK_CELLS // vocab_size)
        ids, values = np.empty((len(nodes), k), np.int32), np.empty((len(nodes), k), np.float32)
        for first in range(0, len(places), chunk):
            part = slice(first, first + chunk)
            best, found = largest(self.logits[:, :vocab_size], k, places[part])
            values[part], ids[part] = best.float().cpu().numpy(), found.cpu().numpy()
        return ids, values

    def _of_table(
        self, table: Scores, places: NDArray[np.int64], k: int, columns: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """What scores on the host tell; drafters ask for the same places one after another."""
        if self._known is not None and self._known[1] == columns:
            known, _, (ids, values) = self._known
            at = known.searchsorted(places)
            if (
                ids.shape[1] >= k
                and at.max(initial=-1) < len(known)
                and (known[at] == places).all()
            ):
                return ids[at, :k], values[at, :k]
        found: tuple[NDArray[np.int32], NDArray[np.float32]] = table.top_k(places, k, columns)
        self._known = places, columns, found
        return found


class Verified:
    """The logits of what was fed, looked up by row and fed token.

    Fed tokens are counted from a row's root, the last token of its text: 0 is the root, 1 + i node
    i of its tree.

    Args:
        logits: [batch, width, vocab_size], width being the tokens fed per row, those that fill
            rows up included; or [1, tokens, vocab_size], the rows' tokens behind one another.
        roots: the index of each row's root among the tokens that were fed in its place of the
            batch; pending tokens that the model had not processed before stand in front of it.
            Of packed rows, among all tokens.
        outputs: all that the model returned.

    Attributes:
        typical: whether the forward took the time that others like it will take.
        width: tokens fed per row, or of all packed rows.
        roots: the place of each row's root among the tokens of all rows, row by row.
    """

    typical = True

    def __init__(self, logits: torch.Tensor, roots: Sequence[int], outputs: Any):
        self.outputs = outputs
        batch, self.width, _ = logits.shape
        own = batch > 1
        self.roots = [row * self.width * own + root for row, root in enumerate(roots)]
        self._shown = logits
        # All logits, where the host can read them as they are.
        self._table = host_scores(logits)
        self._best: list[int] | None = None

    @cached_property
    def _logits(self) -> torch.Tensor:
        """[tokens, vocab_size]"""
        return self._shown.flatten(0, 1)

    def choose(self, rows: Sequence[RowText], nodes: Sequence[int], select: Any) -> list[int]:
        """The next tokens of rows, each behind one fed token of its own.

        Args:
            nodes: the fed tokens.
            select: the call's :class:`~..decoding.selection.TokenSelector`.
        """
        if select.greedy:
            return self.best(rows, nodes)
        chosen: list[int] = select.choose(rows, self.logits(rows, nodes))
        return chosen

    def logits(self, rows: Sequence[RowText], nodes: Sequence[int]) -> torch.Tensor:
        """[rows, vocab_size] behind one fed token of each of these rows."""
        if len(rows) == 1:
            place = self.roots[rows[0].index] + nodes[0]
            return self._logits[place : place + 1]
        places = self.places(rows, nodes)
        step = places[1] - places[0]
        if step > 0 and places == [*range(places[0], places[-1] + 1, step)]:
            return self._logits[places[0] : places[-1] + 1 : step]
        return self._logits[places]

    def places(self, rows: Sequence[RowText], nodes: Sequence[int]) -> list[int]:
        """The places of fed tokens, one of each of these rows, among the tokens of all rows."""
        return [self.roots[row.index] + node for row, node in zip(rows, nodes, strict=True)]

    def of_row(self, row: int, nodes: int) -> torch.Tensor:
        """[1 + nodes, vocab_size] behind a row's root and its nodes."""
        first = self.roots[row]
        return self._logits[first : first + 1 + nodes]

    def top(self, row: int, nodes: int) -> TopLogits:
        """The largest logits behind a row's root and its nodes."""
        first, table = self.roots[row], self._table
        places = np.arange(first, first + 1 + nodes)
        return TopLogits(self._logits if table is None else table, places)

    @property
    def is_sound(self) -> bool:
        """Whether no token's logits are NaN, as one overflow makes those of its whole row: what a
        mask hides is multiplied by 0, and 0 times infinity is NaN."""
        if self._table is not None:
            return not self._table.starts_with_nan()
        return not bool(self._logits[:, 0].isnan().any())

    def wait(self) -> None:
        """Wait until the forward has ended, where it has only been queued."""
        if self._shown.device.type != "cpu":
            self._find_best()

    def best(self, rows: Sequence[RowText], nodes: Sequence[int]) -> list[int]:
        """The most probable token behind one fed token of each of these rows."""
        # A token's logits cost as much as the walk saves by not looking at them.
        if self._table is not None:
            return [self._table.argmax(place) for place in self.places(rows, nodes)]
        if self._logits.device.type == "cpu":
            return argmax_rows(self.logits(rows, nodes)).tolist()
        best = self._find_best()
        return [best[place] for place in self.places(rows, nodes)]

    def _find_best(self) -> list[int]:
        if self._best is None:
            # One transfer instead of one per token; a wider dtype would not change an order.
            self._best = self._logits.argmax(dim=-1).tolist()
        return self._best
