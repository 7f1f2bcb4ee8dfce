"""What one forward over pending tokens and drafts showed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Verified:
    """The logits of what was fed, looked up by row and fed token.

    Fed tokens are counted from a row's root, the last token of its text: 0 is the root, 1 + i node
    i of its tree.

    Args:
        logits: [batch, width, vocab_size], width being the tokens fed per row, those that fill
            rows up included.
        roots: the index of each row's root among the tokens that were fed; pending tokens that
            the model had not processed before stand in front of it.
        outputs: all that the model returned.
    """

    def __init__(self, logits: torch.Tensor, roots: Sequence[int], outputs: Any):
        self.outputs = outputs
        self.roots = roots
        self._logits = logits
        self._best: list[list[int]] | None = None

    @property
    def width(self) -> int:
        """Tokens fed per row."""
        return self._logits.shape[1]

    def logits(self, rows: Sequence[int], nodes: Sequence[int]) -> torch.Tensor:
        """[rows, vocab_size] behind one fed token of each of these rows."""
        places = [self.roots[row] + node for row, node in zip(rows, nodes, strict=True)]
        if len(rows) == len(self._logits) and len(set(places)) == 1:
            return self._logits[:, places[0]]
        if len(rows) == 1:
            return self._logits[rows[0] : rows[0] + 1, places[0]]
        return self._logits[list(rows), places]

    def of_row(self, row: int, nodes: int) -> torch.Tensor:
        """[1 + nodes, vocab_size] behind a row's root and its nodes."""
        first = self.roots[row]
        return self._logits[row, first : first + 1 + nodes]

    def best(self, rows: Sequence[int], nodes: Sequence[int]) -> list[int]:
        """The most probable token behind one fed token of each of these rows."""
        if self._logits.device.type == "cpu":
            # A token's logits cost as much as the walk saves by not looking at them.
            return self.logits(rows, nodes).argmax(dim=-1).tolist()
        if self._best is None:
            # One transfer instead of one per token; a wider dtype would not change an order.
            self._best = self._logits.argmax(dim=-1).tolist()
        return [
            self._best[row][self.roots[row] + node] for row, node in zip(rows, nodes, strict=True)
        ]
