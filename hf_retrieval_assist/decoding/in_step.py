"""Rows of a batch in step: all of them accept as many tokens as the one that accepts fewest.

Then every logits processor, stopping criterion and random draw sees the batch that plain decoding
shows it, token for token, whatever it keeps from one call to the next or from one row to another.
Rows that have ended are fed padding, as plain decoding feeds it, until the last one has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..row_text import Path, RowText
from ..token_tree import TokenTree
from ..verification.verified import Verified
from .walk import Walker


@dataclass(eq=False)
class StepWalk(Walker):
    """Generates tokens of all rows along their trees until one of them has no logits for its next.

    A streamer receives the next token of every row at once, int64 [batch].
    """

    _scores: list[torch.Tensor] = field(default_factory=list, init=False)

    def __call__(self, trees: Sequence[TokenTree], verified: Verified) -> list[Path]:
        """Walk all rows; one path for each."""
        paths = [Path(len(row.generated), accepted=[0]) for row in self.rows]
        while True:
            padding = [row.padding for row in self.rows]
            scores = self._scored([path.accepted[-1] for path in paths], verified)
            drawn = self.select.choose(scores, lambda probs: self.dice.draw(probs, self.rows))
            tokens = [
                token if pad is None else pad for token, pad in zip(drawn, padding, strict=True)
            ]
            for row, path, token, pad in zip(self.rows, paths, tokens, padding, strict=True):
                row.generated.append(token)
                if pad is None:
                    path.tokens.append(token)
            shown = tuple(self._scores) if self.recorder.wants_scores else None
            self.stopping.finish_all(self.rows, self._ids(), shown)
            if self.streamer is not None:
                self.streamer.put(torch.tensor(tokens, device="cpu"))
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
        raw = verified.logits(range(len(nodes)), nodes).to(
            copy=True, dtype=torch.float32, device=ids.device
        )
        scores = self.select.processors(ids, raw)
        self.recorder.tokens(self.rows, scores, raw)
        if self.recorder.wants_scores:
            self._scores.append(scores)
        return scores


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
    chains = [draft.best_chain() for draft in drafts]
    depth = min(map(len, chains))
    together = np.prod([chain.probs[:depth] for chain in chains], axis=0)
    depth = len(plan(TokenTree.chain([*range(depth)], together)))
    kept = iter(chain.prune(depth) for chain in chains)
    return [
        next(kept) if row.padding is None else TokenTree.chain([row.padding] * depth, [1.0] * depth)
        for row in rows
    ]
