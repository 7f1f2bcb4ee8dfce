"""Growing a draft from a model's logits, best first: the dynamic tree of EAGLE-2.

Li et al. 2024, arXiv:2406.16858, section 4: nodes are expanded level by level in order of their
cumulative probability, then the most probable of all candidates are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..token_tree import Float32Array, Int32Array, TokenTree

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
class GrowthLimits:
    """How large a grown tree may become.

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
        for label, least in (("top_k", 1), ("width", 1), ("depth", 0), ("total", 2)):
            if getattr(self, label) < least:
                raise ValueError(f"{label}: expected at least {least}, got {getattr(self, label)}")
        if not 0 <= self.min_prob < 1:
            raise ValueError(f"min_prob: expected a value in [0, 1), got {self.min_prob}")


@dataclass
class Candidates:
    """Nodes of one level, or of all levels in order; flat tensors on the drafting device.

    Attributes:
        token_ids: int64, ids of the target's vocabulary.
        parents: int64, index among all candidates; −1 for children of the root.
        scores: float32, log-probability of the path from the root.
        log_probs: float32, log-probability of the node given its parent.
        ranks: int64, place among its siblings, from the most probable.
    """

    token_ids: Tensor
    parents: Tensor
    scores: Tensor
    log_probs: Tensor
    ranks: Tensor

    @staticmethod
    def join(levels: list[Candidates]) -> Candidates:
        return Candidates(*(torch.cat(parts) for parts in zip(*map(_fields, levels), strict=True)))

    def tree(self) -> TokenTree:
        """The nodes with their evidence classes."""
        parents = self.parents.cpu().numpy().astype(np.int32)
        probs = self.scores.exp().cpu().numpy()
        bare = TokenTree.build(self.token_ids.cpu().numpy(), parents, probs)
        given = self.log_probs.exp().cpu().numpy()
        classes = evidence_classes(given, self.ranks.cpu().numpy(), bare.depths)
        return TokenTree.build(bare.token_ids, parents, bare.probs, classes)


def _fields(level: Candidates) -> tuple[Tensor, ...]:
    return (level.token_ids, level.parents, level.scores, level.log_probs, level.ranks)


class NodeRunner(Protocol):
    """A drafting model that stands behind a text and can be run on the nodes of a tree."""

    def root_logits(self) -> Tensor:
        """[1, ids], for the token after the text."""

    def run(self, parent_rows: Tensor, token_ids: Tensor, depth: int, visible: Tensor) -> Tensor:
        """Run the nodes of a level.

        Args:
            parent_rows: int64 [f], each node's parent among the nodes of the last call; the root
                in the first call.
            token_ids: int64 [f], of the target's vocabulary.
            depth: of the nodes, children of the root being at 1.
            visible: bool [f, nodes run so far and these], each node's ancestors and itself.

        Returns:
            [f, ids], for the token after each node.
        """

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Ids of the target's vocabulary for columns of the logits."""


@dataclass
class _Frontier:
    """Nodes that have been run.

    Attributes:
        nodes: index among all candidates [f]; scores: [f]; logits: [f, ids].
        visible: bool [f, nodes run so far], each node's ancestors and itself.
    """

    nodes: Tensor
    scores: Tensor
    logits: Tensor
    visible: Tensor


def grow(runner: NodeRunner, limits: GrowthLimits, keep: int) -> Candidates:
    """Candidates below the last token of the text, in level order.

    Every candidate that belongs to the `keep` most probable of the full tree is among them, as far
    as `limits.width` reaches: nodes are left unexpanded only when their descendants cannot be.
    """
    floor = _Floor(keep, limits.min_prob)
    frontier = _root(runner.root_logits())
    levels = [_children(runner, frontier, min(limits.top_k, keep))]
    offset = 0
    for depth in range(1, min(limits.depth, keep - 1) + 1):
        level = levels[-1]
        best = _most_probable(level, min(limits.width, keep), floor)
        if not len(best):
            break
        frontier = _expand(runner, frontier, level, best, offset, depth)
        offset += len(level.token_ids)
        levels.append(_children(runner, frontier, min(limits.top_k, keep)))
    return Candidates.join(levels)


def _root(logits: Tensor) -> _Frontier:
    return _Frontier(
        nodes=torch.full((1,), -1, device=logits.device),
        scores=torch.zeros(1, device=logits.device),
        logits=logits,
        visible=torch.ones((1, 0), dtype=torch.bool, device=logits.device),
    )


def _children(runner: NodeRunner, frontier: _Frontier, top_k: int) -> Candidates:
    """The `top_k` likeliest children of each node of the frontier, grouped by parent."""
    log_probs = frontier.logits.float().log_softmax(-1).clamp_(max=0.0)
    top, draft_ids = log_probs.topk(min(top_k, log_probs.shape[-1]), dim=-1)
    count = top.shape[1]
    return Candidates(
        token_ids=runner.to_target_ids(draft_ids).flatten(),
        parents=frontier.nodes.repeat_interleave(count),
        scores=(frontier.scores[:, None] + top).flatten(),
        log_probs=top.flatten(),
        ranks=torch.arange(count, device=top.device).repeat(len(top)),
    )


def _most_probable(level: Candidates, width: int, floor: _Floor) -> Tensor:
    """Indices into the level of the nodes to expand, best first."""
    floor.see(level.scores)
    scores, best = level.scores.topk(min(width, len(level.scores)))
    return best[: int((scores > floor.value).sum())]


def _expand(
    runner: NodeRunner, above: _Frontier, level: Candidates, best: Tensor, offset: int, depth: int
) -> _Frontier:
    """Run the chosen nodes of a level, whose first node is candidate `offset`."""
    parent_rows = best // (len(level.token_ids) // len(above.nodes))
    own = torch.eye(len(best), dtype=torch.bool, device=best.device)
    visible = torch.cat([above.visible[parent_rows], own], dim=1)
    logits = runner.run(parent_rows, level.token_ids[best], depth, visible)
    return _Frontier(best + offset, level.scores[best], logits.to(best.device), visible)


class _Floor:
    """The score that a node must exceed for any descendant to be kept."""

    def __init__(self, keep: int, min_prob: float) -> None:
        self._keep = keep
        self._least = torch.tensor(min_prob).log().item()
        self._best: Tensor | None = None

    def see(self, scores: Tensor) -> None:
        seen = scores if self._best is None else torch.cat([self._best, scores])
        self._best = seen.topk(min(self._keep, len(seen))).values

    @property
    def value(self) -> float:
        if self._best is None or len(self._best) < self._keep:
            return self._least
        return max(self._least, float(self._best[-1]))


def evidence_classes(
    probs: Float32Array, ranks: NDArray[np.int64], depths: Int32Array
) -> Int32Array:
    """The class of each node from its probability after its parent, rank (0: the likeliest
    sibling) and depth (1: a child of the root); int32 [n]."""
    bucket = np.searchsorted(PROB_EDGES, probs, side="right")
    rank = np.minimum(ranks, RANKS - 1)
    depth = np.minimum(depths, DEPTHS) - 1
    return ((bucket * RANKS + rank) * DEPTHS + depth).astype(np.int32)
