"""The target's own forwards behind the texts of a call, for a drafter that runs the target itself.

What is drafted so is written into the call's cache behind the slots that each row keeps, as drafts
that are verified are, and is forgotten before the next verification writes there. So there is no
second prefill and no second cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from ..types.row_text import RowText
from .tree_attention import TreeLayout
from .verifiers import TreeVerifier, Verifier


class TargetForwards:
    """The forwards of one call; ready after its prefill.

    Attributes:
        columns: fed in each row since the drafts began, those that fill rows up included.
    """

    def __init__(self) -> None:
        self.columns = 0
        self._verifier: TreeVerifier | None = None
        self._rows: Sequence[RowText] = ()
        self._deepest: Callable[[RowText], int | None] = lambda row: None
        self._depths: NDArray[np.int64] = np.zeros((0, 0), np.int64)

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
            self._verifier, self._rows = verifier, rows

    @property
    def ready(self) -> bool:
        """Whether the call verifies token trees one kernel at a time, and has begun to."""
        return self._verifier is not None

    def deepest(self, row: int) -> int | None:
        """How deep a tree of a row may be, by its number in the batch; None without limit."""
        return self._deepest(self._rows[row])

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Scope of one draft of all rows, at whose end what was fed is forgotten."""
        assert self._verifier is not None
        self.columns, self._depths = 0, np.zeros((len(self._rows), 0), np.int64)
        try:
            yield
        finally:
            self._verifier.clear_draft()

    def feed(
        self, rows: Sequence[int], token_ids: torch.Tensor, depth: int, sees: torch.Tensor
    ) -> torch.Tensor:
        """Logits [batch, width, vocab_size] behind nodes.

        Args:
            rows: whose nodes they are, numbers in the batch. All others are fed their text's last
                token, with which every draft begins: where no rows are named, all begin.
            token_ids: int64 [rows, width].
            depth: of the nodes.
            sees: bool [rows, width, columns and these], which columns each node sees.
        """
        assert self._verifier is not None
        batch, width, device = len(self._rows), token_ids.shape[1], self._verifier.device
        columns = self.columns + width
        ids = torch.tensor([[row.last] for row in self._rows], device=device).repeat(1, width)
        depths = np.zeros((batch, width), np.int64)
        # Every query sees itself.
        own = torch.eye(width, columns, dtype=torch.bool, device=device).roll(self.columns, 1)
        attends = own.repeat(batch, 1, 1)
        depths[rows] = depth
        if len(rows):
            ids[rows], attends[rows] = token_ids, sees
        self._depths = np.concatenate([self._depths, depths], axis=1)
        self.columns = columns
        every = torch.from_numpy(self._depths).to(device)
        offsets = torch.arange(self.columns - width, self.columns, device=device)[None]
        return self._verifier.draft(ids, TreeLayout(every[:, -width:], every, attends, offsets))
