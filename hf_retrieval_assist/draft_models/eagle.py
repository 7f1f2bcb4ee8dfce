"""Drafts of an EAGLE head: the dynamic tree of EAGLE-2 over the target's own features."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..drafters.base import FeedbackNeeds, Target
from ..token_tree import TokenTree
from ..verification.tree_attention import LayerMask
from .eagle_head import EagleHead
from .features import FeatureDrafter, FeatureSession, Follower, NewText, remember, stacked
from .growth import BestFirst, GrowthLimits, Level, grow
from .rows import DraftCache, Group, last_columns


class EagleDrafter(FeatureDrafter):
    """Drafts with an EAGLE-1, EAGLE-2 or EAGLE-3 head (arXiv:2406.16858, section 4).

    Args:
        head: for the model that is being assisted; shared by all sessions.
        top_k: children of a node, and nodes expanded in a level.
        depth: levels below the first; the tree is `depth + 1` deep.
        total: nodes of the tree with its root, so at most `total - 1` are proposed.
        min_prob: nodes that the head holds less likely than this to be reached are not expanded.

    Raises:
        ValueError: a size is out of range; from `start`, the head is for another target.
    """

    name = "eagle"

    def __init__(
        self,
        head: EagleHead,
        top_k: int = 10,
        depth: int = 5,
        total: int = 60,
        min_prob: float = 0.01,
    ) -> None:
        self.limits = GrowthLimits(top_k, top_k, depth, total, min_prob)
        self.head = head
        self.needs = FeedbackNeeds(hidden_layers=head.config.boundaries)

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> FeatureSession:
        config = self.head.config
        target.require_ids("EAGLE head", config.vocab_size)
        target.require_width("EAGLE head", config.target_width)
        follower = HeadFollower(self.head, self.limits)
        return FeatureSession(follower, prompt_ids, self.limits.total - 1)


class HeadFollower(Follower):
    """A head behind texts; its caches hold what was computed from the target's own features."""

    def __init__(self, head: EagleHead, limits: GrowthLimits) -> None:
        self.head, self.limits = head, limits
        self.feature_width = head.config.feature_width
        self.device, self.dtype = head.device, head.dtype

    def caches(self) -> list[DraftCache]:
        return [DraftCache(self.head.cache_config, LayerMask(), self.dtype)]

    def follow(self, group: Group, text: NewText) -> None:
        (cache,) = group.caches
        mask = cache.feed(*text.layout())
        hidden = self.head.fuse(text.features)
        output = self.head(hidden, text.token_ids, text.positions, mask, cache)
        cache.keep(last_columns(text.counts))
        remember(group, 0, text.counts, output)

    def draft(self, group: Group, asked: Sequence[FeatureSession], keep: int) -> list[TokenTree]:
        self.catch_up(group)
        growth = BestFirst(self.limits, keep, self.head.to_target_ids)
        try:
            return grow(_Nodes(self.head, group, asked), growth)
        finally:
            group.settle()


class _Nodes:
    """The head on the nodes of a level; it is fed its own output."""

    def __init__(self, head: EagleHead, group: Group, asked: Sequence[FeatureSession]) -> None:
        self._head, (self._cache,) = head, group.caches
        like = asked[0].last[0]
        assert like is not None
        self._above = stacked(group.rows, 0, like)[:, None]
        reached = [0 if row is None else row.reached for row in group.rows]
        self._positions = torch.tensor(reached, device=head.device)[:, None] - 1

    def root_logits(self) -> Tensor:
        return self._head.logits(self._above)

    def run(self, level: Level) -> Tensor:
        """See `NodeRunner`."""
        head, width = self._head, level.token_ids.shape[1]
        depths = np.full((len(level.token_ids), width), level.depth - 1)
        mask = self._cache.feed(depths, level.visible)
        states = level.parent_rows[..., None].expand(-1, -1, self._above.shape[2])
        positions = (self._positions + level.depth).expand(-1, width)
        self._above = head(
            self._above.gather(1, states), level.token_ids, positions, mask, self._cache
        )
        return head.logits(self._above)
