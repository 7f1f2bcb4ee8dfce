"""The walk: plain decoding along a token tree whose logits are already there.

Every token is chosen exactly as transformers' own sampling loop chooses it: the logits processors
see the true prefix and one row of logits, then argmax or one draw of `torch.multinomial` decides.
The tree only saves forwards: when the chosen token is a child of the current node, its logits are
at hand and the walk goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..drafters.base import ChildDraw
from ..target.verified import Verified
from ..token_tree import TokenTree
from .recorder import OutputRecorder
from .row_text import RowText
from .selection import TokenSelector
from .stopping import Stopping

# What was drawn below the node that a path of tokens from the root leads to, if anything was.
Drawn = Callable[[Sequence[int]], ChildDraw | None]


@dataclass
class Path:
    """What one walk brought.

    Attributes:
        tokens: generated, in order.
        accepted: indices of the fed tokens that the cache must keep: the root's 0 first, then
            1 + i for each node i on the way; none for a row at rest.
    """

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


class Walk:
    """Generates tokens of one row along a verified tree until it has no logits for the next one.

    Args:
        rows: of the call.
        select: chooses each token.
        stopping: says after each token which rows are finished.
        recorder: is told of each token's scores and logits where the call wants them.
        streamer: receives each token; None: nobody does.
    """

    def __init__(
        self,
        rows: Sequence[RowText],
        select: TokenSelector,
        stopping: Stopping,
        recorder: OutputRecorder,
        streamer: Any = None,
    ):
        self.rows = rows
        self.select = select
        self.stopping = stopping
        self.recorder = recorder
        self.streamer = streamer

    def __call__(
        self, row: RowText, tree: TokenTree, verified: Verified, drawn: Drawn | None = None
    ) -> Path:
        """Walk one row.

        Args:
            row: grows by the generated tokens.
            tree: the nodes that were verified.
            verified: the forward that fed the row's last token, the root, and the nodes.
            drawn: tells what is to be verified by residual sampling; None: nothing is.
        """
        path = Path(accepted=[0])
        while True:
            node = path.accepted[-1]
            token = self._choose(row, node, verified, path.tokens, drawn)
            row.generated.append(token)
            path.tokens.append(token)
            self.stopping.finish(row, self.rows, self.recorder.scores(row))
            if self.streamer is not None:
                self.streamer.put(torch.tensor([token]))
            if row.finished:
                return path
            child = tree.child(node - 1, token) if len(tree) else -1
            if child < 0:
                return path
            path.accepted.append(child + 1)

    def _choose(
        self,
        row: RowText,
        node: int,
        verified: Verified,
        tokens: list[int],
        drawn: Drawn | None,
    ) -> int:
        """The token behind fed token `node` of a row, `tokens` lying between the root and it."""
        if self.select.greedy and not self.recorder.wants_tokens:
            return verified.best(row.index, node)
        # A copy in float32 on the prompt's device, as plain decoding makes one.
        logits = verified.logits(row.index, node)[None]
        raw = logits.to(copy=True, dtype=torch.float32, device=row.ids.device)
        scores = self.select.process(row, raw)
        self.recorder.token(row, scores, raw)
        return self.select.choose(scores, None if drawn is None else drawn(tokens))
