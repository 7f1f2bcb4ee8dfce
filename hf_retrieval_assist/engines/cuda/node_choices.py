"""What a call chooses behind every node of a forward, found on the device before anybody walks.

Where no logits processor looks at the text, the token behind a node follows from its logits and,
where tokens are drawn, from the random numbers of its row and position, which are known beforehand
(:mod:`...decoding.dice`). So all nodes choose together, and the walk finds their tokens in the copy
that comes back anyway: no kernel and no wait for a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch

from ...decoding.dice import Dice, Place
from ...decoding.selection import TokenSelector, process_blindly
from ...structures.lookups import Snapshot
from ...types.row_text import RowText
from ...types.token_tree import TokenTree

# Scores processed together, so that many nodes need no large temporaries.
_MOST_CELLS = 1 << 24


@dataclass(eq=False)
class NodeChoices:
    """Chooses for the nodes of all rows of a call.

    Attributes:
        rows: of the call.
        select: how it chooses; its processors see nothing but the scores.
        dice: its random draws.
        width: tokens per row that are chosen for, filler included; None: a row's own.
        settings: of the processors when it chose last.
    """

    rows: Sequence[RowText]
    select: TokenSelector
    dice: Dice
    width: int | None = None
    settings: Snapshot | None = None

    @property
    def holds(self) -> bool:
        """Whether what was chosen last would be chosen now."""
        return self.select.blind and self.settings is not None and self.settings.is_same()

    def __call__(
        self, logits: torch.Tensor, trees: Sequence[TokenTree], out: torch.Tensor
    ) -> list[int] | None:
        """Write what is chosen, as :data:`~.fixed_verifier.Choose` says.

        Behind filler and rows that have ended it is any token.
        """
        running = [row for row in self.rows if not row.finished]
        self.settings = None
        if not (running and self.select.blind) or logits.device != running[0].device:
            return None
        if self.select.do_sample and not self.dice.reaches(running, logits.shape[-1]):
            return None
        places = [
            self._places(running[0] if row.finished else row, tree)
            for row, tree in zip(self.rows, trees, strict=True)
        ]
        self.settings = self.select.settings()
        # A copy in float32, as plain decoding makes one.
        lines = [line[: len(own)] for line, own in zip(logits, places, strict=True)]
        self._write(torch.cat(lines).float(), list(chain(*places)), out)
        return [0, *accumulate(map(len, places[:-1]))]

    def _places(self, row: RowText, tree: TokenTree) -> list[Place]:
        """Where a row's root, its nodes and what fills them up draw."""
        known = len(row.generated)
        depths = [0, *tree.depths.tolist()]
        filler = [0] * ((self.width or 0) - len(depths))
        return [(known + depth, row.index) for depth in depths + filler]

    def _write(self, logits: torch.Tensor, places: Sequence[Place], out: torch.Tensor) -> None:
        together = max(1, _MOST_CELLS // logits.shape[1])
        for first in range(0, len(places), together):
            part = slice(first, min(first + together, len(places)))
            out[part] = self._choose(logits[part], places[part])

    def _choose(self, logits: torch.Tensor, places: Sequence[Place]) -> torch.Tensor:
        """int64 [n], of logits float32 [n, vocab_size]."""
        scores = process_blindly(self.select.processors, logits)
        if not self.select.do_sample:
            return scores.argmax(dim=-1)
        return self.dice.foresee(scores.softmax(dim=-1), places)
