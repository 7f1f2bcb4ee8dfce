"""How much to verify: the part of a draft that brings the most tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..structures import draft_tree
from ..types.token_tree import Forest, Int32Array, Limits, TokenTree
from .cost_model import CostModel, Float64Array

_LEAST_SHARE = 16  # nodes that each of many rows is asked for
_UNMEASURED_NODES = 64  # asked for where no t(n) says how many would pay

Budget = Literal["auto"] | int

_ANY = Limits()


@dataclass(frozen=True)
class Planner:
    """Keeps of each draft the nodes that pay for their verification.

    A node's probability is the number of tokens that it is expected to bring, and no node is more
    probable than its parent, so the best tree of m nodes is the m most probable ones; of these
    sizes the one with the highest expected tokens per second is kept, which may be none.

    Attributes:
        budget: "auto" does the above; a number keeps that many nodes.
        max_nodes: the most nodes that a drafter may propose under "auto".
    """

    budget: Budget = "auto"
    max_nodes: int = 255

    def __post_init__(self) -> None:
        if self.budget != "auto" and not _is_count(self.budget):
            raise ValueError(
                f'budget: expected "auto" or a number >= 0, got {self.budget!r}; a rule of a paper '
                "is a class of hf_retrieval_assist.papers"
            )
        if self.max_nodes < 1:
            raise ValueError(f"max_nodes: expected at least 1, got {self.max_nodes}")

    def most_nodes(self, few: bool) -> int:
        """The most nodes per row that a forward may verify.

        Args:
            few: whether no forward pays that is wider than what is asked for unmeasured.
        """
        if isinstance(self.budget, int):
            return self.budget
        return min(_UNMEASURED_NODES, self.max_nodes) if few else self.max_nodes

    def request(self, cost: CostModel | None = None) -> int:
        """How many nodes to ask of the drafters: more would not pay even if all were accepted.

        Args:
            cost: t(n); None when it is unknown and only tokens are counted. Where rows share a
                forward without padding, so do they share what is asked for.
        """
        if isinstance(self.budget, int):
            return self.budget
        if cost is None:
            return min(_UNMEASURED_NODES, self.max_nodes)
        most = self.max_nodes
        if cost.shared_width:
            most = min(most, max(_LEAST_SHARE, 2 * most // (1 + cost.shared_width)))
        seconds = cost.curve(1 + most)
        return int(((cost.shared_width + np.arange(1, most + 2)) / seconds).argmax())

    def plan(
        self,
        drafts: Sequence[TokenTree],
        cost: CostModel | None,
        limits: Limits = _ANY,
        belief: float = 1.0,
        weights: Float64Array | None = None,
    ) -> Forest:
        """The part of each row's draft to verify: of what can be verified, what pays.

        Padded rows get one width, the one with the most expected tokens per second of all rows
        together, and each keeps its most probable nodes up to it. Packed rows compete for the
        forward with their nodes.

        Args:
            drafts: one of each row, with calibrated probabilities.
            cost: t(n), n counting every token that is fed: per row, or of packed rows that of one
                row's tokens beside one of each other row. None: unknown; all is kept that was
                asked for.
            limits: of the forward.
            belief: share of the promised tokens that are expected to come.
            weights: float64 [rows], what a token of each row counts, 1 on average; None: all do.

        Returns:
            Trees that are closed under parents, maybe empty.
        """
        forest = limits.within(drafts)
        if cost is not None and self.budget == "auto":
            return forest.prune(_sizes(forest, cost, limits, belief, weights))
        if not len(forest.token_ids):
            return forest
        forest = forest.prune(self.request())
        if limits.total is None or len(forest.token_ids) <= limits.total:
            return forest
        rows = draft_tree.rank(forest.probs, forest.offsets)[0][: limits.total]
        return forest.prune(_shares(forest, rows))


def _sizes(
    forest: Forest, cost: CostModel, limits: Limits, belief: float, weights: Float64Array | None
) -> list[int]:
    """How many nodes of each tree pay."""
    probs = forest.probs
    if weights is not None:
        probs = probs * np.repeat(weights, np.diff(forest.offsets)).astype(np.float32)
    if not limits.packed:
        tokens = draft_tree.by_width(probs, forest.offsets)
        return [_best_width(tokens, cost, limits.backlog, belief)] * len(forest)
    rows, tokens = draft_tree.rank(probs, forest.offsets)
    most = len(rows) if limits.total is None else limits.total
    return _shares(forest, rows[: _best_width(tokens[: most + 1], cost, 0, belief)])


def _best_width(tokens: Float64Array, cost: CostModel, extra_tokens: int, belief: float) -> int:
    """The number of nodes at which `tokens`, float64 [nodes + 1], come fastest."""
    seconds = cost.curve(extra_tokens + len(tokens))[extra_tokens:]
    tokens = tokens[0] + belief * (tokens - tokens[0])
    return int((tokens / seconds).argmax())


def _shares(forest: Forest, rows: Int32Array) -> list[int]:
    """How many nodes each tree has among some, whose trees are given."""
    return np.bincount(rows, minlength=len(forest)).tolist()


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
