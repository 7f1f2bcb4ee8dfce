"""The growth of trees whose shape is given, level by level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..drafters.base import ChildDraw, Foresight
from ..kernels.largest import most_probable
from ..structures import draft_tree
from ..token_tree import Float32Array, Int32Array, TokenTree
from .growth import Growth, Level
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


@dataclass(frozen=True, eq=False)
class _Level:
    """One forward: nodes that have children, and the nodes below them.

    Attributes:
        chosen: int64 [w], which nodes of the level above's children are fed.
        attends: bool [w, c], which nodes fed so far, these among them, each is or descends from.
        parents: int64 [children], row of each child's parent among the fed nodes.
        ranks: int64 [children].
    """

    chosen: NDArray[np.int64]
    attends: NDArray[np.bool_]
    parents: NDArray[np.int64]
    ranks: NDArray[np.int64]


class Schedule:
    """The forwards that draft a tree of one shape; the first one feeds the text only."""

    def __init__(self, shape: TreeShape):
        self.shape = shape
        self.child_counts = shape.child_counts
        inner = np.flatnonzero(self.child_counts[1:])
        # Number of each node in the order of feeding; −1: a leaf, never fed.
        self.fed_number = np.full(len(shape), -1, np.int32)
        self.fed_number[inner] = np.arange(len(inner))
        depths = draft_tree.depths(shape.parents).astype(np.int64) - 1
        above = draft_tree.ancestor_mask(shape.parents)
        self.levels = [
            self._level(level, inner, depths, above) for level in range(shape.levels - 1)
        ]
        self._sent: dict[tuple[int, torch.device], tuple[Tensor, ...]] = {}

    def on(self, device: torch.device, level: int) -> tuple[Tensor, ...]:
        """The fields of a level, in their order, sent to a device once."""
        if (level, device) not in self._sent:
            at = self.levels[level]
            fields = at.chosen, at.attends, at.parents, at.ranks
            self._sent[level, device] = tuple(torch.from_numpy(x).to(device) for x in fields)
        return self._sent[level, device]

    def _level(
        self,
        level: int,
        inner: NDArray[np.int64],
        depths: NDArray[np.int64],
        above: NDArray[np.bool_],
    ) -> _Level:
        """Forward number `level`, whose children lie at that depth."""
        children = np.flatnonzero(depths == level)
        fed = inner[depths[inner] == level - 1]
        columns = inner[depths[inner] < level]
        parents = self.shape.parents[children]
        first = np.flatnonzero(depths == level - 1)
        return _Level(
            chosen=fed - first[0] if len(first) else fed,
            attends=above[np.ix_(fed, columns)],
            parents=np.searchsorted(fed, parents) if level else np.zeros(len(children), np.int64),
            ranks=self.shape.ranks[children].astype(np.int64),
        )


class StaticGrowth(Growth):
    """Trees of one shape.

    Args:
        schedule: of the shape.
        temperature: that children are drawn at; None: they are the most probable tokens.
        foresights: of each row, what chooses its children instead where it is not None.
    """

    def __init__(
        self,
        schedule: Schedule,
        temperature: float | None,
        foresights: Sequence[Foresight | None],
    ) -> None:
        self._schedule, self._temperature = schedule, temperature
        self._foresights = foresights
        # Of each row the drafted tokens that lead to the nodes which are fed.
        self._paths: list[list[list[int]]] = [[[]] for _ in foresights]
        # Of each level [rows, nodes].
        self._tokens: list[Tensor] = []
        self._rates: list[Tensor] = []
        # Of each level what was drawn below the nodes that were fed, [rows, w, ids] and their
        # children, and how many of these belong to the tree.
        self._draws: list[tuple[Tensor, Tensor, list[int]]] = []

    def add(self, logits: Tensor) -> None:
        done = len(self._tokens)
        level = self._schedule.levels[done]
        _, _, parents, ranks = self._schedule.on(logits.device, done)
        count = int(level.ranks.max()) + 1
        if self._temperature is None:
            log_probs, children = most_probable(logits, count)
            probs = log_probs.exp()
            self._foresee(logits, children, probs, level)
        else:
            law = torch.softmax(logits.float() / self._temperature, dim=-1)
            children = draw_children(law, count)
            probs = law.gather(-1, children)
            counts = np.bincount(level.parents, minlength=law.shape[1]).tolist()
            self._draws.append((law, children, counts))
        self._tokens.append(children[:, parents, ranks])
        self._rates.append(probs[:, parents, ranks])

    def _foresee(self, logits: Tensor, children: Tensor, probs: Tensor, level: _Level) -> None:
        """Put what will be drawn of a row in the place of what is most probable."""
        count = children.shape[-1]
        for row, foresight in enumerate(self._foresights):
            if foresight is None:
                continue
            paths = self._paths[row]
            scores, ids = foresight.best(logits[row], paths, max(count, _COMPARED))
            children[row], probs[row] = ids[:, :count], scores.softmax(dim=-1)[:, :count]
            below = children[row, level.parents, level.ranks].tolist()
            paths = [
                [*paths[parent], token] for parent, token in zip(level.parents, below, strict=True)
            ]
            done = len(self._tokens) + 1
            if done < len(self._schedule.levels):
                self._paths[row] = [paths[node] for node in self._schedule.levels[done].chosen]

    def level(self) -> Level | None:
        done = len(self._tokens)
        if done == len(self._schedule.levels):
            return None
        above = self._tokens[-1]
        chosen, attends, _, _ = self._schedule.on(above.device, done)
        # Parents among the nodes of the level above are not asked for: the cache knows them.
        return Level(done, above[:, chosen], above[:, :0], attends.expand(len(above), -1, -1))

    def trees(self) -> list[TokenTree]:
        # One transfer of all levels: the bits of the rates beside the ids.
        bits = torch.cat(self._rates, dim=1).float().view(torch.int32)
        drafted = torch.stack([torch.cat(self._tokens, dim=1).int(), bits]).cpu().numpy()
        ids, rates = drafted[0], drafted[1].view(np.float32)
        shape = self._schedule.shape
        return [
            TokenTree(
                tokens,
                shape.parents,
                draft_tree.path_products(shape.parents, given),
                classes_by_rank(given, shape.ranks, foreseen=foresight is not None),
            )
            for tokens, given, foresight in zip(ids, rates, self._foresights, strict=True)
        ]

    def draws_of(self, row: int) -> list[ChildDraw]:
        """What was drawn below the text, then below every node that was fed."""
        return [
            ChildDraw(law[row, node], children[row, node, :count])
            for law, children, counts in self._draws
            for node, count in enumerate(counts)
        ]


def classes_by_rank(rates: Float32Array, ranks: Int32Array, foreseen: bool = False) -> Int32Array:
    """int32 [n]: class of each node from the model's probability of it and its rank; or, where the
    draws are known, from its share among the first choices."""
    bins = np.searchsorted(PROB_EDGES, rates)
    first = len(PRIORS) // 2 if foreseen else 0
    return (first + bins * RANKS + np.minimum(ranks, RANKS - 1)).astype(np.int32)
