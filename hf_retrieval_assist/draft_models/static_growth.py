"""The growth of trees whose shape is given, level by level."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..drafters.base import Foresight
from ..structures import draft_tree
from ..token_tree import Float32Array, Int32Array, TokenTree
from .growth import Choice, Chosen, Growth, Level, likeliest, paths_to
from .residual import draw_children
from .sequoia import TreeShape

# Evidence: the draft model's probability of the node given its parent, and its rank.
PROB_EDGES = np.array([0.01, 0.03, 0.06, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9, 0.97], np.float32)
PROB_MIDDLES = np.array(
    [0.005, 0.02, 0.045, 0.08, 0.15, 0.25, 0.37, 0.52, 0.67, 0.82, 0.93, 0.98], np.float32
)
RANKS = 4  # the last one stands for all further ranks

_FORESEEN = np.outer(0.4 + 0.5 * PROB_MIDDLES, [1.0, 0.2, 0.1, 0.03])

PRIORS: Float32Array = np.concatenate([np.repeat(PROB_MIDDLES, RANKS), _FORESEEN.ravel()]).astype(
    np.float32
)
"""Of the evidence classes: the model's own probabilities, as if right about them at any rank; then,
where the draws are known, how far the node leads among the first choices."""

# Choices that a node is weighed against where the draws are known.
_COMPARED = 4


class Drawn:
    """A `Choice` that draws tokens without replacement from the model's law at a temperature.

    Attributes:
        draws: of each level the laws [rows, w, ids] and the children [rows, w, c] drawn from them.
    """

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature
        self.draws: list[tuple[Tensor, Tensor]] = []

    def __call__(self, logits: Tensor, count: int, levels: Sequence[Level]) -> Chosen:
        law = torch.softmax(logits.float() / self._temperature, dim=-1)
        children = draw_children(law, count)
        self.draws.append((law, children))
        log_probs = law.gather(-1, children).log()
        return Chosen(children, log_probs, log_probs)

    def of_row(self, row: int) -> list[tuple[Tensor, Tensor]]:
        """Law and children below the text, then below every node that was fed."""
        return [
            (law, children)
            for laws, drawn in self.draws
            for law, children in zip(laws[row], drawn[row], strict=True)
        ]


class Foreseen:
    """A `Choice` of what rows will draw where that is known, and of the most probable elsewhere.

    Args:
        foresights: of each row; None: nothing is known.
    """

    def __init__(self, foresights: Sequence[Foresight | None]) -> None:
        self._foresights = foresights

    def __call__(self, logits: Tensor, count: int, levels: Sequence[Level]) -> Chosen:
        ids, log_probs, _ = likeliest(logits, count, levels)
        for row, foresight in enumerate(self._foresights):
            if foresight is not None:
                most = max(count, _COMPARED)
                scores, found = foresight.best(logits[row], paths_to(levels, row), most)
                ids[row], log_probs[row] = found[:, :count], scores.log_softmax(-1)[:, :count]
        return Chosen(ids, log_probs, log_probs)


class StaticGrowth(Growth):
    """Trees of one shape.

    Args:
        shape: the trees'.
        choose: the children of a node.
        foreseen: of each row, whether its draws are known.
    """

    def __init__(self, shape: TreeShape, choose: Choice, foreseen: Sequence[bool]) -> None:
        super().__init__()
        self._shape, self._choose, self._foreseen = shape, choose, foreseen
        # Of each level [rows, nodes].
        self._tokens: list[Tensor] = []
        self._log_probs: list[Tensor] = []

    def add(self, logits: Tensor) -> None:
        forward = self._shape.on(logits.device)[len(self._tokens)]
        chosen = self._choose(logits, forward.width, self.levels)
        self._tokens.append(chosen.ids[:, forward.hangs, forward.ranks])
        self._log_probs.append(chosen.log_probs[:, forward.hangs, forward.ranks])

    def next_level(self) -> Level | None:
        done, above = len(self._tokens), self._tokens[-1]
        if done == self._shape.levels - 1:
            return None
        forward = self._shape.on(above.device)[done - 1]
        parent_rows = forward.parent_rows.expand(len(above), -1)
        visible = forward.visible.expand(len(above), -1, -1)
        return Level(done, above[:, forward.fed], parent_rows, visible)

    def trees(self) -> list[TokenTree]:
        # One transfer of all levels: the bits of the probabilities beside the ids.
        bits = torch.cat(self._log_probs, dim=1).float().view(torch.int32)
        drafted = torch.stack([torch.cat(self._tokens, dim=1).int(), bits]).cpu().numpy()
        ids, rates = drafted[0], np.exp(drafted[1].view(np.float32))
        parents, ranks = self._shape.parents, self._shape.ranks
        return [
            TokenTree(
                tokens,
                parents,
                draft_tree.path_products(parents, given),
                classes_by_rank(given, ranks, foreseen),
            )
            for tokens, given, foreseen in zip(ids, rates, self._foreseen, strict=True)
        ]


def classes_by_rank(rates: Float32Array, ranks: Int32Array, foreseen: bool = False) -> Int32Array:
    """int32 [n]: class of each node from the model's probability of it and its rank; or, where the
    draws are known, from its share among the first choices."""
    bins = np.searchsorted(PROB_EDGES, rates)
    first = len(PRIORS) // 2 if foreseen else 0
    return (first + bins * RANKS + np.minimum(ranks, RANKS - 1)).astype(np.int32)
