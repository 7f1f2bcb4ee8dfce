"""Drafting level by level: the one loop of all models that draft from their own output.

Each level is one forward for all rows. What becomes a node, and which nodes are run, is decided by
a `Growth`: here best first, the dynamic tree of EAGLE-2 (Li et al. 2024, arXiv:2406.16858, section
4), which expands nodes in order of their cumulative probability, then keeps the most probable of
all candidates.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.largest import most_probable
from ..system.arguments import require_at_least
from ..token_tree import Float32Array, Forest, Int32Array, TokenTree

# Evidence: how likely the drafting model holds the token after its parent, its place among the
# siblings, and how deep it stands, for a model is trusted less the longer it feeds on its own
# output.
PROB_EDGES = np.array([0.03, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95], np.float32)
PROB_MIDDLES = np.array([0.015, 0.06, 0.15, 0.3, 0.5, 0.7, 0.88, 0.98], np.float32)
RANKS = 4
DEPTHS = 4

PRIORS: Float32Array = np.repeat(PROB_MIDDLES, RANKS * DEPTHS)
"""Of the evidence classes: the model's probabilities, as if right at any rank and depth."""


@dataclass(frozen=True)
class Level:
    """Nodes to be run in one forward; w of each row.

    Attributes:
        depth: of the nodes, children of the root being at 1.
        token_ids: int64 [rows, w], of the target's vocabulary.
        parent_rows: int64 [rows, w], each node's parent among the nodes of the level above.
        visible: bool [rows, w, nodes run so far and these], each node's ancestors and itself.
    """

    depth: int
    token_ids: Tensor
    parent_rows: Tensor
    visible: Tensor


class NodeRunner(Protocol):
    """A drafting model that stands behind the texts of some rows."""

    def root_logits(self) -> Tensor:
        """[rows, 1, ids], for the token after each text."""

    def run(self, level: Level) -> Tensor:
        """[rows, w, ids], for the token after each node."""


class Growth(ABC):
    """The trees of some rows while they are drafted."""

    @abstractmethod
    def add(self, logits: Tensor) -> None:
        """Make children of the nodes that were run last from their logits, [rows, w, ids]."""

    @abstractmethod
    def level(self) -> Level | None:
        """What to run next; None when the trees are done."""

    @abstractmethod
    def trees(self) -> Sequence[TokenTree]:
        """One for each row."""


def grow(runner: NodeRunner, growth: Growth) -> Sequence[TokenTree]:
    """Draft below the last token of each text."""
    run_levels(runner, growth)
    return growth.trees()


def run_levels(runner: NodeRunner, growth: Growth) -> None:
    """All forwards of a draft."""
    growth.add(runner.root_logits())
    while (level := growth.level()) is not None:
        growth.add(runner.run(level))


@dataclass(frozen=True)
class GrowthLimits:
    """How large a tree that is grown best first may become.

    Attributes:
        top_k: children of a node.
        width: nodes expanded in a level.
        depth: levels expanded below the first, so the tree is `depth + 1` deep.
        total: nodes of the tree with its root, so at most `total - 1` are proposed.
        min_prob: nodes no more probable than this are not expanded.

    Raises:
        ValueError: a size is out of range.
    """

    top_k: int
    width: int
    depth: int
    total: int
    min_prob: float

    def __post_init__(self) -> None:
        require_at_least(1, top_k=self.top_k, width=self.width)
        require_at_least(0, depth=self.depth)
        require_at_least(2, total=self.total)
        if not 0 <= self.min_prob < 1:
            raise ValueError(f"min_prob: expected a value in [0, 1), got {self.min_prob}")


@dataclass(frozen=True)
class _Candidates:
    """Children of the nodes that one forward ran, c of each of w nodes of every row.

    Attributes:
        parents: int64 [rows, w], index of the node among all candidates of the row; −1: the root.
        token_ids: int64 [rows, w * c], ids of the target's vocabulary, the likeliest of each node
            first.
        scores: float32 [rows, w * c], log-probability of the path from the root; −inf: no node.
        log_probs: float32 [rows, w * c], log-probability of the node given its parent.
    """

    parents: Tensor
    token_ids: Tensor
    scores: Tensor
    log_probs: Tensor


@dataclass(frozen=True)
class Grown:
    """The candidates of all levels that may be kept, still on the device that found them.

    Attributes:
        packed: int32 [rows, m * (1 + 3 * children)]: `parents` of m nodes, then `token_ids`,
            `scores` and `log_probs` of their children, floats as their bits.
        children: of each node.
        widths: nodes that were run of each level.
    """

    packed: Tensor
    children: int
    widths: tuple[int, ...]

    @classmethod
    def of(cls, levels: Sequence[_Candidates], keep: int) -> Grown:
        """The `keep` most probable of each row, and what equals the last of them."""
        parents, ids, scores, log_probs = (
            [getattr(level, field.name) for level in levels] for field in fields(_Candidates)
        )
        integers = torch.cat([*parents, *ids], dim=1).int()
        found = torch.cat(scores, dim=1)
        least = found.topk(min(keep, found.shape[1]), dim=1).values[:, -1:]
        found = found.where(found >= least, -torch.inf)
        bits = torch.cat([found, *log_probs], dim=1).view(torch.int32)
        widths = tuple(nodes.shape[1] for nodes in parents)
        return cls(torch.cat([integers, bits], dim=1), ids[0].shape[1] // widths[0], widths)

    def trees(self) -> Forest:
        """One of each row, in one transfer of all levels."""
        found, nodes = self.packed.cpu().numpy(), sum(self.widths)
        ids, scores, log_probs = found[:, nodes:].reshape(len(found), 3, -1).swapaxes(0, 1)
        kept = scores.view(np.float32) > -np.inf
        sizes, (rows, columns) = kept.sum(1), kept.nonzero()
        # Of each candidate its place in the tree; the last one is the root.
        places = np.full((len(found), kept.shape[1] + 1), -1, np.int32)
        places[rows, columns] = (kept.cumsum(1) - 1)[rows, columns]
        parents = columns // self.children
        depths = np.arange(1, len(self.widths) + 1, dtype=np.int32)
        classes = evidence_classes(
            np.exp(log_probs.view(np.float32)[rows, columns]),
            columns % self.children,
            depths.repeat(self.widths)[parents],
        )
        probs = np.exp(scores.view(np.float32)[rows, columns])
        offsets = np.concatenate([[0], sizes.cumsum()])
        above = places[rows, found[rows, parents]]
        return Forest(ids[rows, columns], above, probs, classes, offsets)


class BestFirst(Growth):
    """Grows trees best first.

    Every candidate that belongs to the `keep` most probable of the full tree is in the tree, as far
    as `limits.width` reaches: nodes are left unexpanded only when their descendants cannot be.

    Args:
        limits: of a tree.
        keep: how many nodes of each tree will be kept.
        to_target_ids: from columns of the logits to ids of the target's vocabulary.
        whole: whether all levels are run at their full width, without a look at what is worth it.
    """

    def __init__(
        self,
        limits: GrowthLimits,
        keep: int,
        to_target_ids: Callable[[Tensor], Tensor],
        whole: bool = False,
    ) -> None:
        self._limits, self._keep, self._to_target_ids = limits, keep, to_target_ids
        self._whole = whole
        self._least = math.log(limits.min_prob) if limits.min_prob else -math.inf
        self._top_k = min(limits.top_k, keep)
        self._levels: list[_Candidates] = []
        self._known = 0  # candidates above the last level
        self._run = 0  # levels run
        # Scores of the `keep` most probable candidates so far.
        self._best: Tensor | None = None
        # Of the nodes that were run last: their numbers among all candidates, scores, ancestors.
        self._nodes = self._scores = self._visible = torch.empty(0)

    def add(self, logits: Tensor) -> None:
        if not self._levels:
            rows, device = len(logits), logits.device
            self._nodes = torch.full((rows, 1), -1, device=device)
            self._scores = torch.zeros((rows, 1), device=device)
            self._visible = torch.ones((rows, 1, 0), dtype=torch.bool, device=device)
        logits = logits.to(self._scores.device)
        log_probs, draft_ids = most_probable(logits, self._top_k)
        self._levels.append(
            _Candidates(
                parents=self._nodes,
                token_ids=self._to_target_ids(draft_ids).flatten(1).to(log_probs.device),
                scores=(self._scores[..., None] + log_probs).flatten(1),
                log_probs=log_probs.flatten(1),
            )
        )

    def level(self) -> Level | None:
        if self._run >= min(self._limits.depth, self._keep - 1):
            return None
        level = self._levels[-1]
        size = level.scores.shape[1]
        scores, best = level.scores.topk(min(self._limits.width, self._keep, size), dim=1)
        expanded = scores > self._floor(level.scores)
        width = best.shape[1] if self._whole else int(expanded.sum(1).max())
        if not width:
            return None
        # The rows with fewer nodes to expand run others, of which nothing comes.
        best, scores = best[:, :width], scores.where(expanded, -torch.inf)[:, :width]
        parent_rows = best // (size // self._nodes.shape[1])
        seen = self._visible.shape[2]
        above = self._visible.gather(1, parent_rows[..., None].expand(-1, -1, seen))
        own = torch.eye(width, dtype=torch.bool, device=best.device).expand(len(best), -1, -1)
        self._visible = torch.cat([above, own], dim=2)
        self._nodes, self._scores = best + self._known, scores
        self._known += size
        self._run += 1
        return Level(self._run, level.token_ids.gather(1, best), parent_rows, self._visible)

    def _floor(self, scores: Tensor) -> Tensor:
        """[rows, 1], the score that a node must exceed for any descendant to be kept."""
        seen = scores if self._best is None else torch.cat([self._best, scores], dim=1)
        self._best = seen.topk(min(self._keep, seen.shape[1]), dim=1).values
        if self._best.shape[1] < self._keep:
            return scores.new_full((len(scores), 1), self._least)
        return self._best[:, -1:].clamp_min(self._least)

    def trees(self) -> Forest:
        return self.grown().trees()

    @property
    def best(self) -> Tensor:
        """float32 [rows, 1 + levels], 0, then how probable the likeliest path to each depth is."""
        best = torch.stack([level.scores.amax(1) for level in self._levels], dim=1).exp()
        return F.pad(best, (1, 0))

    def grown(self) -> Grown:
        """What the levels so far have found."""
        return Grown.of(self._levels, self._keep)


def evidence_classes(probs: Float32Array, ranks: NDArray[Any], depths: Int32Array) -> Int32Array:
    """The class of each node from its probability after its parent, rank (0: the likeliest
    sibling) and depth (1: a child of the root); int32 [n]."""
    bucket = np.searchsorted(PROB_EDGES, probs, side="right")
    rank = np.minimum(ranks, RANKS - 1)
    depth = np.minimum(depths, DEPTHS) - 1
    return ((bucket * RANKS + rank) * DEPTHS + depth).astype(np.int32)
