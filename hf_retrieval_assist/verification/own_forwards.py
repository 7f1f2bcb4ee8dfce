"""The target's own forwards behind the texts of a call, for a drafter that runs the target itself.

What is drafted so is written into the call's cache behind the slots that each row keeps, as drafts
that are verified are, and is forgotten before the next verification writes there. So there is no
second prefill and no second cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ..row_text import RowText
from .tree_attention import FedTrees
from .verifiers import TreeVerifier, Verifier


@dataclass(frozen=True)
class Level:
    """Nodes of one row that are fed together.

    Attributes:
        token_ids: of the nodes; −1 is the text's last token, with which every draft begins.
        depths: of the nodes; that token has depth 0.
        ancestors: for each node, the columns of its ancestors. A node's column is the number of
            columns before its level, see `OwnForwards.columns`, plus its place in the level.
    """

    token_ids: Sequence[int]
    depths: Sequence[int]
    ancestors: Sequence[Sequence[int]]


class OwnForwards:
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
        if type(verifier) is TreeVerifier:
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
            self._verifier.forget()

    def feed(self, levels: Mapping[int, Level]) -> torch.Tensor:
        """Logits [batch, width, vocab_size] behind nodes.

        Args:
            levels: by the row's number in the batch; rows without one are fed filler.
        """
        assert self._verifier is not None
        batch, width = len(self._rows), max(len(level.token_ids) for level in levels.values())
        done, columns = self.columns, self.columns + width
        ids = np.repeat(np.array([[row.last] for row in self._rows], np.int64), width, axis=1)
        depths = np.zeros((batch, width), np.int64)
        attends = np.zeros((batch, width, columns), np.bool_)
        # Filler sees itself, so that every query sees something.
        attends[:, np.arange(width), done + np.arange(width)] = True
        for row, level in levels.items():
            tokens = np.array(level.token_ids, np.int64)
            ids[row, : len(tokens)] = np.where(tokens < 0, self._rows[row].last, tokens)
            depths[row, : len(level.depths)] = level.depths
            for node, ancestors in enumerate(level.ancestors):
                attends[row, node, list(ancestors)] = True
        self._depths = np.concatenate([self._depths, depths], axis=1)
        self.columns = columns
        fed = FedTrees.on(self._verifier.device, ids, depths, attends, self._depths)
        return self._verifier.draft(fed)
