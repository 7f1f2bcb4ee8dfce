"""The walk: plain decoding along token trees whose logits are already there.

Every token is chosen exactly as transformers' own sampling loop chooses it: the logits processors
see the true prefix and its logits, then argmax or one draw of `torch.multinomial` decides.
The tree only saves forwards: when the chosen token is a child of the current node, its logits are
at hand and the walk goes on.

Rows of a batch walk on their own. Where something follows all of them from token to token, they
are decoded plainly, see :meth:`~.call.Call.service`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..draft_models.residual import ChildDraw
from ..host.plain_step import STREAMS_FIRST
from ..system import changes
from ..types.row_text import Path, RowText
from ..types.token_tree import Forest
from ..verification.verified import Verified
from .call import Call
from .recorder import OutputCollector
from .selection import TokenSelector

Drawn = Callable[[Sequence[int]], ChildDraw | None]
"""What was drawn below the node that a path of tokens from the root leads to, if anything was."""


class Walk:
    """Generates tokens of rows along verified trees until there are no logits for the next ones.

    All rows that still walk choose their next tokens together, which costs about what one of them
    costs.

    Args:
        call: whose tokens.
        rows: of the call.
        residual: whether drafts that were drawn may be verified by residual sampling.

    Attributes:
        select: chooses the tokens.
        stopping: says after each token which rows are finished.
        collector: is told of each token's scores and logits where the call wants them.
        rowwise: the same, where logits are of no other use and rows choose alone; else None.
    """

    def __init__(self, call: Call, rows: Sequence[RowText], residual: bool):
        self.rows = rows
        self.select = TokenSelector(call.processors, call.config.do_sample, rows)
        self.stopping = call.stopping
        self.collector = OutputCollector(call.config, call.batch_size)
        self.residual = residual and self.select.do_sample
        self._needs_scores = self.collector.wants_tokens or self.residual
        self.rowwise = None if self._needs_scores else self.select
        # Residual sampling draws otherwise.
        self.select.draws.plain = not self.residual
        self._streamer = call.streamer
        on_host = rows[0].device.type == "cpu"
        self._apart = self.rowwise is not None and on_host and len(rows) == 1

    def end(self, tokens: int) -> bool:
        """End the streamer's text and leave the generator as plain decoding does after so many
        tokens of every row. Returns whether all were drawn as plain decoding draws them."""
        self.select.draws.end(tokens)
        if self._streamer is not None:
            self._streamer.end()
        return self.select.draws.plain

    def __call__(
        self,
        trees: Forest,
        verified: Verified,
        drawn: Sequence[Drawn] | None = None,
    ) -> list[Path]:
        """Walk all rows that have not ended; they grow by the generated tokens.

        Args:
            trees: the nodes that were verified, one tree per row of the batch.
            verified: the forward that fed each row's last token, the root, and its nodes.
            drawn: per row, tells what is to be verified by residual sampling; None: nothing is.

        Returns:
            One path per row of the batch.
        """
        paths = [Path(len(row.generated)) for row in self.rows]
        walking = [row for row in self.rows if not row.finished]
        for row in walking:
            paths[row.index].accepted.append(0)
        if self._apart and walking and (bounds := self._bounds) is not None:
            for row in walking:
                self._walk_apart(row, paths[row.index], trees, verified, *bounds)
            self.stopping.finish(walking, self.rows, None)
            return paths
        said = changes.said()
        while walking:
            nodes = [paths[row.index].accepted[-1] for row in walking]
            if self._needs_scores:
                chosen = self._choose_by_scores(walking, nodes, verified, paths, drawn)
            else:
                chosen = verified.choose(walking, nodes, self.select)
            for row, token in zip(walking, chosen, strict=True):
                row.generated.append(token)
                paths[row.index].tokens.append(token)
            if STREAMS_FIRST and self._streamer is not None:
                self._stream(walking)
            shown = self.collector.shown if self._needs_scores else None
            self.stopping.finish(walking, self.rows, shown)
            if not STREAMS_FIRST and self._streamer is not None:
                self._stream(walking)
            if changes.said() != said:
                break  # the logits at hand are those of another model
            walking = self._following(walking, trees, paths)
        return paths

    @property
    def _bounds(self) -> tuple[int | None, frozenset[int]] | None:
        """Those of :class:`Stopping` where nobody else's code runs between two tokens."""
        return self.stopping.bounds if self._streamer is None and self.select.blind else None

    def _walk_apart(
        self,
        row: RowText,
        path: Path,
        trees: Forest,
        verified: Verified,
        most: int | None,
        ends: frozenset[int],
    ) -> None:
        """Walk one row up to so many tokens of text, or one that ends it."""
        rows, index, node, length = [row], row.index, 0, len(row)
        while True:
            [token] = verified.choose(rows, [node], self.select)
            row.generated.append(token)
            path.tokens.append(token)
            length += 1
            if token in ends or (most is not None and length >= most):
                break
            node = 1 + trees.child(index, node - 1, token)
            if node == 0:
                break
            path.accepted.append(node)

    def _choose_by_scores(
        self,
        walking: Sequence[RowText],
        nodes: Sequence[int],
        verified: Verified,
        paths: Sequence[Path],
        drawn: Sequence[Drawn] | None,
    ) -> list[int]:
        """The next tokens of rows that have come to these nodes, whose scores are recorded or
        compared with what drafts were drawn from."""
        select = self.select
        raw = select.copied(verified.logits(walking, nodes))
        scores = select.process(walking, raw)
        self.collector.tokens(walking, scores, raw)
        if drawn is None:
            return select.pick(walking, scores)
        return [
            select.verify(one, drawn[row.index](paths[row.index].tokens))
            for row, one in zip(walking, scores, strict=True)
        ]

    def _stream(self, walking: Sequence[RowText]) -> None:
        """Give the streamer the newest token of a call's only row."""
        self._streamer.put(torch.tensor([row.last for row in walking], device="cpu"))

    def _following(
        self, walking: Sequence[RowText], trees: Forest, paths: Sequence[Path]
    ) -> list[RowText]:
        """The rows whose trees have the chosen token below the path's end, and so logits for the
        next one."""
        going_on = []
        for row in walking:
            if row.finished:
                continue
            path = paths[row.index].accepted
            child = trees.child(row.index, path[-1] - 1, row.generated[-1])
            if child >= 0:
                path.append(child + 1)
                going_on.append(row)
        return going_on
