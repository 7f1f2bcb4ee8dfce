"""Sequoia: the static tree that brings the most tokens, and how it grows (Chen et al. 2024, 4).

The k-th child of an accepted node is the accepted one with probability p_k, wherever the node is. A
tree is then worth the sum over its nodes of the product of p along the path, and the best tree of
every size and depth comes out of one dynamic programme. Sizes and levels count the root here, whose
term 1 is the token that every step brings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from ..drafters.call_view import Preview
from ..structures import draft_tree
from ..system.lazy import cached_property
from ..system.locks import Lock
from ..system.running_mean import toward
from ..types.evidence import EvidenceClasses
from ..types.token_tree import Float64Array, Int32Array, TokenTree, ancestor_mask
from .growth import Choice, Chosen, Level, Run, likeliest, paths_to
from .residual import draw_children

_PRIOR_HAZARDS = (0.6, 0.3, 0.2, 0.15, 0.1)  # ranks 1, 2, …; the last one for all others
_PRIOR_TRIALS = 4.0
_MEMORY = 2000.0  # trials of the first rank, after which half of all are forgotten

_RECONSIDER = 32  # steps from one look at what the tree was solved for to the next
_TOLERANCE = 0.1  # relative change of the times, absolute change of p, that asks for another tree
_PASS_MEMORY = 0.1  # share of a new timing in the mean time of a pass

_MIDDLES = np.array(
    [0.005, 0.02, 0.045, 0.08, 0.15, 0.25, 0.37, 0.52, 0.67, 0.82, 0.93, 0.98], np.float32
)
_EDGES = np.array([0.01, 0.03, 0.06, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9, 0.97], np.float32)
_LEADS = np.outer(0.4 + 0.5 * _MIDDLES, [1.0, 0.2, 0.1, 0.03])
EVIDENCE = EvidenceClasses(
    [np.broadcast_to(_MIDDLES[:, None], _LEADS.shape), _LEADS], (1,), _EDGES, (1, 2, 3)
)
"""Whether the draws are known, the draft model's probability of the node given its parent, or how
far it leads among the first choices, and its rank, the last one standing for all further ranks. At
first the model's own probabilities are taken for right at any rank."""

# Choices that a node is weighed against where the draws are known.
_COMPARED = 4


class Forward(NamedTuple):
    """What one forward over a level brings; the first one of a tree feeds the text only.

    Attributes:
        width: the most children of a node.
        places: int64 [m], of each child among so many of every node that it feeds.
        fed: int64 [w], which of these the next forward feeds.
        parent_rows, visible, columns: of what the next forward feeds; see `growth.Level`. The first
            two have one row.
    """

    width: int
    places: Tensor
    fed: Tensor
    parent_rows: Tensor
    visible: Tensor
    columns: Tensor


@dataclass(frozen=True, eq=False)
class TreeShape:
    """A static tree without its root, level by level, siblings in the order of their ranks.

    Attributes:
        parents: int32 [n], index of each node's parent, −1 for children of the root.
        ranks: int32 [n], 0-based place of the node among its siblings, in the order of drawing.
    """

    parents: Int32Array
    ranks: Int32Array
    _sent: dict[torch.device, list[Forward]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def levels(self) -> int:
        """Levels, the root's included."""
        return 1 + int(draft_tree.depths(self.parents).max(initial=0))

    @cached_property
    def child_counts(self) -> Int32Array:
        """int32 [n + 1]: how many children the root has, then every node."""
        return np.bincount(self.parents + 1, minlength=len(self) + 1).astype(np.int32)

    @cached_property
    def fed_number(self) -> Int32Array:
        """int32 [n], number of each node in the order of feeding; −1: a leaf, never fed."""
        fed = self.child_counts[1:] > 0
        return np.where(fed, fed.cumsum() - 1, -1).astype(np.int32)

    def on(self, device: torch.device) -> list[Forward]:
        """The forwards that draft the tree, with their indices on a device."""
        if device not in self._sent:
            self._sent[device] = list(self._forwards(device))
        return self._sent[device]

    def _forwards(self, device: torch.device) -> Iterator[Forward]:
        depths = draft_tree.depths(self.parents) - 1
        above = ancestor_mask(self.parents)
        inner = np.flatnonzero(self.child_counts[1:])
        before = np.array([-1])
        for depth in range(self.levels - 1):
            children, fed = np.flatnonzero(depths == depth), inner[depths[inner] == depth]
            hangs = np.searchsorted(before, self.parents[children])
            ranks, next_fed = self.ranks[children], fed - children[0]
            width = 1 + int(ranks.max())
            so_far = inner[depths[inner] <= depth]
            yield Forward(
                width,
                torch.from_numpy(hangs * width + ranks).to(device),
                torch.from_numpy(next_fed).to(device),
                torch.from_numpy(hangs[next_fed])[None],
                torch.from_numpy(above[np.ix_(fed, so_far)])[None],
                torch.from_numpy(depths[so_far]).long(),
            )
            before = fed


class OptimalTrees:
    """The best trees of all sizes up to `max_nodes`, for one acceptance vector.

    T(m, l, b) = max over y of T(y, l, b−1) + p_b·M(m−y, l−1), where M(m, l) is the maximum over b
    (section 3.1 and appendix; O(N²·L·K) time). p need not be sorted.

    Args:
        acceptance: [K], p_1, …, p_K, of events that exclude each other; a node has at most K
            children.
        max_nodes: the largest size of interest, root included.
        max_levels: the largest depth of interest, root included; None: any.

    Attributes:
        values: float64 [max_nodes + 1, max_levels + 1]: the most expected tokens of a tree of
            exactly so many nodes on at most so many levels; −inf where there is no such tree.
    """

    def __init__(self, acceptance: ArrayLike, max_nodes: int, max_levels: int | None = None):
        self.acceptance = np.asarray(acceptance, np.float64)
        self.max_nodes = max_nodes
        self.max_levels = max_nodes if max_levels is None else max_levels
        bounds, branches = self.max_levels + 1, len(self.acceptance) + 1
        # T(m, l, b); the size left to the root and its first b−1 children; the best b.
        table = np.full((self.max_nodes + 1, bounds, branches), -np.inf)
        self._left = np.zeros(table.shape, np.int32)
        self._branches = np.zeros(table.shape[:2], np.int32)
        self.values = np.full(table.shape[:2], -np.inf)
        table[1, 1:, 0] = self.values[1, 1:] = 1.0
        for size in range(2, self.max_nodes + 1):
            best = self._best_splits(table, size)
            table[size, :, 1:] = best
            self._branches[size] = table[size].argmax(axis=-1)
            self.values[size] = table[size].max(axis=-1)

    def _best_splits(self, table: Float64Array, size: int) -> Float64Array:
        """float64 [bounds, K]: T(size, ·, b) for b ≥ 1; keeps which split gives it."""
        # A subtree has a level less than its tree; no level admits no tree at all.
        below = np.maximum(np.arange(self.max_levels + 1) - 1, 0)
        subtrees = self.values[size - 1 : 0 : -1][:, below, None]
        with np.errstate(invalid="ignore"):
            gains = np.where(subtrees > 0, subtrees * self.acceptance, -np.inf)
        totals = table[1:size, :, :-1] + gains
        left = totals.argmax(axis=0)
        self._left[size, :, 1:] = left + 1
        return np.take_along_axis(totals, left[None], axis=0)[0]

    def tree(self, nodes: int, max_levels: int | None = None) -> TreeShape:
        """A best tree of at most `nodes` nodes on at most `max_levels` levels, root included."""
        bound = self.max_levels if max_levels is None else min(max_levels, self.max_levels)
        # A larger feasible tree is never worse.
        size = int(np.flatnonzero(np.isfinite(self.values[: nodes + 1, bound]))[-1])
        return self._walk_back(size, bound)

    def _walk_back(self, size: int, bound: int) -> TreeShape:
        parents: list[int] = []
        ranks: list[int] = []
        level = [(-1, size, bound)]
        while level:
            below = []
            for node, nodes, limit in level:
                for rank, subtree in enumerate(self._child_sizes(nodes, limit)):
                    below.append((len(parents), subtree, limit - 1))
                    parents.append(node)
                    ranks.append(rank)
            level = below
        return TreeShape(np.array(parents, np.int32), np.array(ranks, np.int32))

    def _child_sizes(self, size: int, bound: int) -> list[int]:
        """Sizes of the subtrees below a node whose own subtree has `size` nodes."""
        sizes = []
        for branch in range(int(self._branches[size, bound]), 0, -1):
            left = int(self._left[size, bound, branch])
            sizes.append(size - left)
            size = left
        return sizes[::-1]

    def speedups(self, seconds: ArrayLike, draft_seconds: float) -> Float64Array:
        """Tokens per second against plain decoding, for every size and bound on the levels.

        Args:
            seconds: float64 [≥ max_nodes], t(1), t(2), … of the target (section 3.3).
            draft_seconds: of one pass of the draft model. A tree of l levels takes l − 1 passes,
                since its leaves are not fed.

        Returns:
            float64 [max_nodes + 1, max_levels + 1], 0 where there is no such tree.
        """
        times = np.asarray(seconds, dtype=np.float64)[: self.max_nodes]
        passes = np.arange(-1, self.max_levels).clip(0)
        step = np.append(np.inf, times)[:, None] + draft_seconds * passes
        return np.maximum(self.values, 0.0) * times[0] / step

    def fastest(self, seconds: ArrayLike, draft_seconds: float) -> TreeShape:
        """The tree with the most tokens per second; arguments as for `speedups`."""
        rates = self.speedups(seconds, draft_seconds)
        size, bound = np.unravel_index(int(rates.argmax()), rates.shape)
        return self._walk_back(int(size), int(bound))


class AcceptanceCounts:
    """Measures the acceptance vector: how often the k-th child of an accepted node is accepted.

    Nodes have different numbers of children, so what is counted is how often the k-th child was
    accepted of the times it was reached (the product-limit estimate): a node that had no k-th child
    says nothing of it. Old counts are forgotten.

    Args:
        width: ranks to keep, K.
    """

    def __init__(self, width: int):
        hazards = np.array(_PRIOR_HAZARDS + (_PRIOR_HAZARDS[-1],) * width)[:width]
        self._prior = _PRIOR_TRIALS * np.stack([np.ones(width), hazards])
        # How often each rank was reached, and how often accepted.
        self._counts = self._prior.copy()

    def observe(self, children: int, accepted: int) -> None:
        """Count an accepted node with `children` children, of which the one of rank `accepted`
        (0 first; −1: none) was accepted."""
        reached, accepts = self._counts
        reached[: children if accepted < 0 else accepted + 1] += 1
        if 0 <= accepted < len(accepts):
            accepts[accepted] += 1
        if reached[0] > _MEMORY:
            self._counts = 0.5 * (self._counts + self._prior)

    @property
    def vector(self) -> Float64Array:
        """float64 [width]: p_1, …, p_K; sums to at most 1."""
        reached, accepts = self._counts
        hazards = accepts / reached
        survival = np.append(1.0, np.cumprod(1 - hazards)[:-1])
        return hazards * survival


class ShapeChooser:
    """Keeps the tree that is fastest for what has been measured lately. Thread-safe.

    Measures the acceptance vector and the time of a draft pass, is told the target's t(n), and
    solves for the tree again when one of them has changed (section 3.3).

    Args:
        width: children of a node at most.
        max_nodes: size of a tree at most, its root included.
        max_levels: levels of a tree at most, its root included.
        share: what a pass takes of the target's step of one token, until one was timed. A first
            draft that is too dear for what it brings costs more than many later ones save.
    """

    def __init__(self, width: int, max_nodes: int, max_levels: int, share: float = 0.0):
        self.max_nodes = max_nodes
        self.max_levels = max_levels
        self.counts = AcceptanceCounts(width)
        self._share = share
        self._pass = 0.0
        self._seconds: Float64Array | None = None
        self._asked = 0
        self._lock = Lock()
        self._solve()

    def observe(self, children: int, accepted: int) -> None:
        """Count one accepted node; see `AcceptanceCounts.observe`."""
        with self._lock:
            self.counts.observe(children, accepted)

    @property
    def draft_seconds(self) -> float:
        """Time of one forward of the draft model over a level; before any, what is supposed."""
        if self._pass or self._seconds is None:
            return self._pass
        return self._share * float(self._seconds[0])

    def observe_pass(self, seconds: float) -> None:
        """Learn the time of one forward of the draft model over a level."""
        with self._lock:
            first = not self._pass
            self._pass = toward(self._pass, seconds, _PASS_MEMORY)
            if first and self._seconds is not None:
                self._solve()

    def set_seconds(self, seconds: ArrayLike) -> None:
        """Tell t(1), t(2), …, at least `max_nodes` of them; None was told: the largest tree."""
        with self._lock:
            first = self._seconds is None
            self._seconds = np.array(seconds, dtype=np.float64)[: self.max_nodes]
            if first:
                self._solve()

    def shape(self, budget: int | None = None) -> TreeShape:
        """The tree to draft now, of at most `budget` nodes below the root.

        The same object for the same budget until the tree is solved for again.
        """
        with self._lock:
            self._asked += 1
            if self._asked % _RECONSIDER == 0 and self._has_changed():
                self._solve()
            if budget is None or len(self._shape) <= budget:
                return self._shape
            return self._tree(budget + 1)

    def _measured(self) -> Float64Array:
        times = np.empty(0) if self._seconds is None else self._seconds
        return np.concatenate(
            [self.counts.vector, np.log(np.append(times, self.draft_seconds) + 1e-12)]
        )

    def _has_changed(self) -> bool:
        now, then = self._measured(), self._solved_for
        return now.shape != then.shape or np.abs(now - then).max() > _TOLERANCE

    def _solve(self) -> None:
        self._solved_for = self._measured()
        trees = OptimalTrees(self.counts.vector, self.max_nodes, self.max_levels)
        self._tree = cache(trees.tree)
        if self._seconds is None:
            self._shape = self._tree(self.max_nodes)
        else:
            self._shape = trees.fastest(self._seconds, self.draft_seconds)


Draws = list[tuple[Tensor, Tensor]]
"""Laws, and the children that were drawn from each."""


def drawn(
    temperature: float, draws: Draws, logits: Tensor, count: int, levels: Sequence[Level]
) -> Chosen:
    """A `Choice` that draws tokens without replacement from the model's law at a temperature; adds
    the laws [rows, w, ids] and the children [rows, w, c] to `draws`."""
    law = torch.softmax(logits.float() / temperature, dim=-1)
    children = draw_children(law, count)
    draws.append((law, children))
    log_probs = law.gather(-1, children).log()
    return Chosen(children, log_probs, log_probs)


def foreseen(
    previews: Sequence[Preview | None], logits: Tensor, count: int, levels: Sequence[Level]
) -> Chosen:
    """A `Choice` of what rows will draw where they have a preview, elsewhere of the likeliest."""
    ids, log_probs, _ = likeliest(logits, count, levels)
    for row, preview in enumerate(previews):
        if preview is not None:
            most = max(count, _COMPARED)
            scores, found = preview.best(logits[row], paths_to(levels, row), most)
            ids[row], log_probs[row] = found[:, :count], scores.log_softmax(-1)[:, :count]
    return Chosen(ids, log_probs, log_probs)


def grow(
    shape: TreeShape, choose: Choice, run: Run, previews: Sequence[Preview | None]
) -> list[TokenTree]:
    """A tree of one shape for each row.

    Args:
        shape: the trees'.
        choose: the children of a node.
        run: the forwards.
        previews: of each row; None: its draws are not known.
    """
    levels: list[Level] = []
    tokens, log_probs = [], []  # each level's [rows, nodes]
    logits = run(None)
    for depth, forward in enumerate(shape.on(logits.device), 1):
        chosen = choose(logits, forward.width, levels)
        tokens.append(chosen.ids.flatten(1)[:, forward.places])
        log_probs.append(chosen.log_probs.flatten(1)[:, forward.places])
        if depth < shape.levels - 1:
            fed = tokens[-1][:, forward.fed]
            parent_rows = forward.parent_rows.expand(len(fed), -1)
            visible = forward.visible.expand(len(fed), -1, -1)
            levels.append(Level(depth, fed, parent_rows, visible, forward.columns))
            logits = run(levels[-1])
    # One transfer of all levels: the bits of the probabilities beside the ids.
    bits = torch.cat(log_probs, dim=1).float().view(torch.int32)
    drafted = torch.stack([torch.cat(tokens, dim=1).int(), bits]).cpu().numpy()
    trees = []
    for ids, rates, preview in zip(
        drafted[0], np.exp(drafted[1].view(np.float32)), previews, strict=True
    ):
        probs = draft_tree.path_products(shape.parents, rates)
        classes = EVIDENCE.of(preview is not None, rates, shape.ranks)
        trees.append(TokenTree(ids, shape.parents, probs, classes))
    return trees
