"""The tokens of one forward: what each row is fed, behind how many slots, and who sees whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..structures import draft_tree
from ..token_tree import TokenTree
from .tree_attention import BoolArray, FedTrees, Int64Array


@dataclass(frozen=True)
class FedTokens:
    """A line of tokens for every row that is fed: its root, its tree's nodes, and filler.

    Attributes:
        rows: int64 [n], their numbers in the cache, ascending.
        counts: int64 [n], tokens of each line without filler.
        lengths: int64 [n], slots that each row has kept.
        token_ids: int64 [n, width]; filler repeats the root's.
        depths: int64 [n, width]; the root has depth 0.
        sees: bool [n, width, columns], queries and keys: a token itself and those that it descends
            from. Nobody sees filler.
        offsets: int64 [n, width], in which of the slots behind the kept ones they are written;
            None: in one after another.
        behind: int64 [n, columns], depths of what lies in these slots; None: of the tokens.
    """

    rows: Int64Array
    counts: Int64Array
    lengths: Int64Array
    token_ids: Int64Array
    depths: Int64Array
    sees: BoolArray
    offsets: Int64Array | None = None
    behind: Int64Array | None = None

    @classmethod
    def of(
        cls,
        roots: Sequence[int],
        trees: Sequence[TokenTree],
        lengths: Sequence[int],
        rows: Sequence[int] | None = None,
        width: int | None = None,
    ) -> FedTokens:
        """The tokens of trees below their roots.

        Args:
            roots, trees, lengths: of every row in the cache.
            rows: that are fed; None: all.
            width: of a line; None: the widest row's.
        """
        fed = range(len(trees)) if rows is None else rows
        grown = [trees[row] for row in fed]
        counts = np.array([len(tree) for tree in grown], np.int64)
        token_ids, depths, sees = draft_tree.arrange(
            np.array([roots[row] for row in fed], np.int64),
            counts,
            np.concatenate([tree.token_ids for tree in grown]),
            np.concatenate([tree.parents for tree in grown]),
            width or 1 + int(counts.max()),
        )
        kept = np.array([lengths[row] for row in fed], np.int64)
        return cls(np.array(fed, np.int64), 1 + counts, kept, token_ids, depths, sees)

    @property
    def width(self) -> int:
        return self.token_ids.shape[1]

    @property
    def slots(self) -> Int64Array:
        """int64 [n, width]: where the tokens are written."""
        offsets = np.arange(self.width) if self.offsets is None else self.offsets
        return self.lengths[:, None] + offsets

    @property
    def columns(self) -> Int64Array:
        """int64 [n, columns]: depths of all that lies behind the kept slots."""
        return self.depths if self.behind is None else self.behind

    @property
    def begins(self) -> Int64Array:
        """int64 [n]: where each row's root stands among the tokens of all, filler left out."""
        return np.cumsum(self.counts) - self.counts

    @property
    def real(self) -> BoolArray:
        """bool [n, width]: what is no filler."""
        return np.arange(self.width) < self.counts[:, None]

    def lines(self, device: torch.device) -> FedTrees:
        """On a device, row by row."""
        arrays = self.token_ids, self.depths, self.sees
        ids, depths, sees = (torch.from_numpy(array).to(device) for array in arrays)
        return FedTrees(ids, depths, sees, depths, int(self.depths.max()))

    def packed(self, device: torch.device) -> FedTrees:
        """On a device, a line for every token, whose columns are the tokens of its row."""
        real, rows = self.real, np.repeat(self.rows, self.counts)
        arrays = (a[real][:, None] for a in (self.token_ids, self.depths, self.sees))
        ids, depths, sees = (torch.from_numpy(array).to(device) for array in arrays)
        columns = torch.from_numpy(np.repeat(self.depths, self.counts, axis=0)).to(device)
        return FedTrees(ids, depths, sees, columns, int(self.depths.max()), rows)
