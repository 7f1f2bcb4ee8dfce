"""Rows of a batch in step: all of them accept as many tokens as the one that accepts fewest.

Then every logits processor, stopping criterion and random draw sees the batch that plain decoding
shows it, token for token, whatever it keeps from one call to the next or from one row to another.
Rows that have ended are fed padding, as plain decoding feeds it, until the last one has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ..target.verified import Verified
from ..target.verifiers import best_chain
from ..token_tree import TokenTree
from .recorder import OutputRecorder
from .row_text import RowText
from .selection import TokenSelector
from .stopping import Stopping
from .walk import Path


class StepWalk:
    """Generates tokens of all rows along their trees until one of them has no logits for its next.

    Args:
        rows: of the call.
        select: chooses the tokens.
        stopping: says after each token which rows have ended.
        recorder: is told of the tokens' scores and logits where the call wants them.
    """

    def __init__(
        self,
        rows: Sequence[RowText],
        select: TokenSelector,
        stopping: Stopping,
        recorder: OutputRecorder,
    ):
        self.rows = rows
        self.select = select
        self.stopping = stopping
        self.recorder = recorder
        self._scores: list[torch.Tensor] = []

    def __call__(self, trees: Sequence[TokenTree], verified: Verified) -> list[Path]:
        """Walk all rows; one path for each."""
        paths = [Path(len(row.generated), accepted=[0]) for row in self.rows]
        while True:
            padded = [row.padded for row in self.rows]
            scores = self._scored([path.accepted[-1] for path in paths], verified)
            tokens = self._padded(self.select.choose_all(scores))
            for row, path, token, ended in zip(self.rows, paths, tokens, padded, strict=True):
                row.generated.append(token)
                if not ended:
                    path.tokens.append(token)
            shown = tuple(self._scores) if self.recorder.wants_scores else None
            self.stopping.finish_all(self.rows, self._ids(), shown)
            if self.rows[0].finished:
                return paths
            children = [
                tree.child(path.accepted[-1] - 1, token)
                for tree, path, token in zip(trees, paths, tokens, strict=True)
            ]
            if min(children) < 0:
                return paths
            for path, child in zip(paths, children, strict=True):
                path.accepted.append(child + 1)

    def _ids(self) -> torch.Tensor:
        """int64 [batch, length]: what plain decoding would have at this point."""
        return torch.cat([row.ids for row in self.rows])

    def _scored(self, nodes: Sequence[int], verified: Verified) -> torch.Tensor:
        """Processed scores [batch, vocab_size] behind one fed token of each row."""
        ids = self._ids()
        logits = torch.stack([verified.logits(i, node) for i, node in enumerate(nodes)])
        raw = logits.to(copy=True, dtype=torch.float32, device=ids.device)
        scores = self.select.processors(ids, raw)
        for row in self.rows:
            one = slice(row.index, row.index + 1)
            self.recorder.token(row, scores[one], raw[one])
        if self.recorder.wants_scores:
            self._scores.append(scores)
        return scores

    def _padded(self, tokens: Sequence[int]) -> list[int]:
        """The tokens, padding in the place of those of rows that have ended."""
        return [
            token if row.pad_id is None or row.met is None else row.pad_id
            for row, token in zip(self.rows, tokens, strict=True)
        ]


def drafts_in_step(
    rows: Sequence[RowText],
    drafts: Sequence[TokenTree],
    plan: Callable[[TokenTree], TokenTree],
) -> list[TokenTree]:
    """What to verify of each row: chains of one length, to which all rows are likely to get.

    Args:
        rows: of the call.
        drafts: of the rows that have not ended, in their order.
        plan: the part that pays of a draft of which every node brings a token to each row.
    """
    chains = [best_chain(draft) for draft in drafts]
    depth = min(map(len, chains))
    together = np.prod([chain.probs[:depth] for chain in chains], axis=0)
    depth = len(plan(TokenTree.chain(np.arange(depth), together)))
    kept = iter(chain.cut_depth(depth) for chain in chains)
    return [
        next(kept)
        if row.pad_id is None or row.met is None
        else TokenTree.chain([row.pad_id] * depth, [1.0] * depth)
        for row in rows
    ]
