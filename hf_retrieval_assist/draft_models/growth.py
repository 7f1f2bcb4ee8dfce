"""Drafting level by level, for all models that draft from their own output.

Each level is one forward for all rows, a `Run`. A `Choice` says what may follow the nodes that were
run. Which of that becomes a node, and which nodes are run next, is decided best first here, as in
the dynamic tree of EAGLE-2 (Li et al. 2024, arXiv:2406.16858, section 4), which expands nodes in
order of their cumulative probability, then keeps the most probable of all candidates; and by a
shape that is given in `sequoia`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ..system.arguments import require_at_least
from ..types.evidence import EvidenceClasses
from ..types.token_tree import Float32Array, Forest, Int32Array
from ..verification.largest import largest, most_probable
from ..verification.tree_attention import TreeLayout

_MIDDLES = np.array([0.015, 0.06, 0.15, 0.3, 0.5, 0.7, 0.88, 0.98])
EVIDENCE = EvidenceClasses(
    np.broadcast_to(_MIDDLES[:, None, None], (8, 4, 4)),
    np.array([0.03, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95], np.float32),
    *((1, 2, 3), (2, 3, 4)),
)
"""How likely the drafting model holds the token after its parent, its place among the siblings, and
how deep it stands, for a model is trusted less the longer it feeds on its own output. At first its
probabilities are taken for right at any rank and depth."""


class Level(NamedTuple):
    """Nodes to be run in one forward; w of each row.

    Attributes:
        depth: of the nodes, children of the root being at 1.
        token_ids: int64 [rows, w], of the target's vocabulary.
        parent_rows: int64 [rows, w], each node's parent among the nodes of the level above.
        visible: bool [rows, w, nodes run so far and these], each node's ancestors and itself.
        columns: int64 [nodes run so far and these], how many nodes each of them has above it.
    """

    depth: int
    token_ids: Tensor
    parent_rows: Tensor
    visible: Tensor
    columns: Tensor

    def fed(self, missing: int = 0) -> TreeLayout:
        """Where they lie, behind the nodes run before, of which the first ones may be missing."""
        width, columns = self.token_ids.shape[1], self.columns[None, missing:]
        offsets = torch.arange(columns.shape[1], device=columns.device)[None, -width:]
        return TreeLayout(columns[:, -width:], columns, self.visible[:, :, missing:], offsets)


def paths_to(levels: Sequence[Level], row: int) -> list[list[int]]:
    """The drafted tokens that lead to each node of the last level; of no level, to the root."""
    paths: list[list[int]] = [[]]
    for level in levels:
        nodes = zip(level.parent_rows[row].tolist(), level.token_ids[row].tolist(), strict=True)
        paths = [[*paths[parent], token] for parent, token in nodes]
    return paths


class Chosen(NamedTuple):
    """What may follow each node of a level, c tokens of each of w nodes.

    Attributes:
        ids: int64 [rows, w, c], columns of the logits, the likeliest of each node first.
        log_probs: float32 [rows, w, c], of each token after its node; −inf: it is no candidate.
        evidence: float32 [rows, w, c], what tells a node's class of evidence.
    """

    ids: Tensor
    log_probs: Tensor
    evidence: Tensor


Choice = Callable[[Tensor, int, Sequence[Level]], Chosen]
"""Given logits [rows, w, ids] behind the nodes of the last level, how many tokens are wanted of
each, and the levels so far."""


def likeliest(logits: Tensor, count: int, levels: Sequence[Level]) -> Chosen:
    """The tokens that the model holds most probable."""
    log_probs, ids = most_probable(logits, count)
    return Chosen(ids, log_probs, log_probs)


Run = Callable[[Level | None], Tensor]
"""A drafting model behind the texts of some rows: [rows, w, ids], for the token after each node of
a level, or after each text, where it is told of none."""


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
class Grown:
    """The candidates of all levels that may be kept, still on the device that found them.

    Attributes:
        packed: int32 [rows, m * (1 + 3 * children)]: `parents` of m nodes, then `token_ids`,
            `scores` and `evidence` of their children, floats as their bits.
        children: of each node.
        widths: nodes that were run of each level.
    """

    packed: Tensor
    children: int
    widths: tuple[int, ...]

    def trees(self, classify: Classify) -> Forest:
        """One of each row, in one transfer of all levels."""
        found, nodes = self.packed.cpu().numpy(), sum(self.widths)
        ids, scores, evidence = found[:, nodes:].reshape(len(found), 3, -1).swapaxes(0, 1)
        kept = scores.view(np.float32) > -np.inf
        sizes, (rows, columns) = kept.sum(1), kept.nonzero()
        # Each candidate's place in the tree; the last one is the root.
        places = np.full((len(found), kept.shape[1] + 1), -1, np.int32)
        places[rows, columns] = (kept.cumsum(1) - 1)[rows, columns]
        parents = columns // self.children
        depths = np.arange(1, len(self.widths) + 1, dtype=np.int32)
        classes = classify(
            evidence.view(np.float32)[rows, columns],
            columns % self.children,
            depths.repeat(self.widths)[parents],
        )
        probs = np.exp(scores.view(np.float32)[rows, columns])
        offsets = np.concatenate([[0], sizes.cumsum()])
        above = places[rows, found[rows, parents]]
        return Forest(ids[rows, columns], above, probs, classes, offsets)


class BestFirst:
    """Grows the trees of some rows best first.

    Every candidate that belongs to the `keep` most probable of the full tree is in the tree, as far
    as `limits.width` reaches: nodes are left unexpanded only when their descendants cannot be.

    Args:
        limits: of a tree.
        keep: how many nodes of each tree will be kept.
        to_target_ids: from columns of the logits to ids of the target's vocabulary; None: the same.
        choose: what may follow a node.
        whole: whether all levels are run at their full width, without a look at what is worth it.
    """

    def __init__(
        self,
        limits: GrowthLimits,
        keep: int,
        to_target_ids: Callable[[Tensor], Tensor] | None = None,
        choose: Choice = likeliest,
        whole: bool = False,
    ) -> None:
        self._limits, self._keep, self._choose = limits, keep, choose
        self._to_target_ids, self._whole = to_target_ids, whole
        self._least = math.log(limits.min_prob) if limits.min_prob else -math.inf
        self._top_k = min(limits.top_k, keep)
        self._levels: list[Level] = []  # that were run
        # Each level's, and the texts': the numbers int64 [rows, w] of the nodes that were run
        # among all candidates of the row, −1 for the root; then of their children, c of each,
        # [rows, w * c], ids of the target's vocabulary, log-probabilities of the path from the
        # root, −inf where there is no node, and evidence.
        self._parents: list[Tensor] = []
        self._ids: list[Tensor] = []
        self._reached: list[Tensor] = []
        self._evidence: list[Tensor] = []
        self._known = 0  # candidates above the last level
        # Scores of the `keep` most probable candidates so far.
        self._best: Tensor | None = None
        # The nodes that are run: their numbers, and their scores.
        self._nodes = self._scores = torch.empty(0)

    def grow(self, run: Run) -> None:
        """All forwards of a draft, below the last token of each text."""
        logits = run(None)
        self._nodes = torch.full((len(logits), 1), -1, device=logits.device)
        self._scores = torch.zeros((len(logits), 1), device=logits.device)
        self._add(logits)
        while (level := self._next_level()) is not None:
            self._levels.append(level)
            self._add(run(level))

    def _add(self, logits: Tensor) -> None:
        """Make children of the nodes that were run last from their logits, [rows, w, ids]."""
        chosen = self._choose(logits.to(self._scores.device), self._top_k, self._levels)
        ids = chosen.ids if self._to_target_ids is None else self._to_target_ids(chosen.ids)
        scores = (self._scores[..., None] + chosen.log_probs).flatten(1)
        self._parents.append(self._nodes)
        self._ids.append(ids.flatten(1).to(scores.device))
        # What overflowed is no candidate.
        self._reached.append(scores.nan_to_num_(nan=-torch.inf, neginf=-torch.inf))
        self._evidence.append(chosen.evidence.flatten(1))

    def _next_level(self) -> Level | None:
        """What to run next; None when the trees are done."""
        run, reached = len(self._levels), self._reached[-1]
        if run >= min(self._limits.depth, self._keep - 1):
            return None
        size = reached.shape[1]
        scores, best = largest(reached, min(self._limits.width, self._keep, size))
        expanded = scores > self._floor(reached)
        width = best.shape[1] if self._whole else int(expanded.sum(1).max())
        if not width:
            return None
        # The rows with fewer nodes to expand run others, of which nothing comes.
        best, scores = best[:, :width], scores.where(expanded, -torch.inf)[:, :width]
        parent_rows = best // (size // self._nodes.shape[1])
        visible = torch.eye(width, dtype=torch.bool, device=best.device).expand(len(best), -1, -1)
        columns = best.new_full((width,), run)
        if run:
            above = self._levels[-1]
            parents = parent_rows[..., None].expand(-1, -1, above.visible.shape[2])
            visible = torch.cat([above.visible.gather(1, parents), visible], dim=2)
            columns = torch.cat([above.columns, columns])
        self._nodes, self._scores = best + self._known, scores
        self._known += size
        return Level(run + 1, self._ids[-1].gather(1, best), parent_rows, visible, columns)

    def _floor(self, scores: Tensor) -> Tensor:
        """[rows, 1], the score that a node must exceed for any descendant to be kept."""
        seen = scores if self._best is None else torch.cat([self._best, scores], dim=1)
        self._best = seen.topk(min(self._keep, seen.shape[1]), dim=1).values
        if self._best.shape[1] < self._keep:
            return scores.new_full((len(scores), 1), self._least)
        return self._best[:, -1:].clamp_min(self._least)

    @property
    def best(self) -> Tensor:
        """float32 [rows, 1 + levels], 0, then how probable the likeliest path to each depth is."""
        best = torch.stack([scores.amax(1) for scores in self._reached], dim=1).exp()
        return F.pad(best, (1, 0))

    def grown(self) -> Grown:
        """The `keep` most probable of each row so far, and what equals the last of them."""
        scores = torch.cat(self._reached, dim=1)
        least = scores.topk(min(self._keep, scores.shape[1]), dim=1).values[:, -1:]
        scores = scores.where(scores >= least, -torch.inf)
        integers = torch.cat([*self._parents, *self._ids], dim=1).int()
        bits = torch.cat([scores, *self._evidence], dim=1).view(torch.int32)
        widths = tuple(nodes.shape[1] for nodes in self._parents)
        children = self._ids[0].shape[1] // widths[0]
        return Grown(torch.cat([integers, bits], dim=1), children, widths)


Classify = Callable[[Float32Array, NDArray[Any], Int32Array], Int32Array]
"""The class of each node from its evidence, rank (0: the likeliest sibling) and depth (1: a child
of the root); int32 [n]."""


def by_probability(evidence: Float32Array, ranks: NDArray[Any], depths: Int32Array) -> Int32Array:
    """Classes where the evidence is the log-probability of a node after its parent."""
    return EVIDENCE.of(np.exp(evidence), ranks, depths)
