"""Drafts of P-EAGLE heads (arXiv:2602.01469): EAGLE-3 heads that draft all levels at once.

Behind the text they read mask tokens, each beside one learnt vector instead of features, and none
of these tells what the others will be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...draft_models.rows import Group
from ...types.token_tree import TokenTree
from ...verification.tree_attention import TreeLayout
from .dflash import product_trees
from .features import FeatureSession, Follower
from .layers_follower import LayersFollower


class ParallelFollower(LayersFollower):
    """A P-EAGLE head behind texts; its cache grows on every device."""

    def catch_up(self, group: Group) -> None:
        Follower.catch_up(self, group)

    def draft(
        self, group: Group, asked: Sequence[FeatureSession], keep: int
    ) -> Sequence[TokenTree]:
        self.catch_up(group)
        head: Any = self.module
        (cache,), rows = group.caches, len(group.rows)
        assert cache.last is not None  # it has read what the drafts stand behind
        masks = head.config.slots - 1
        reached = [[0 if row is None else row.reached] for row in group.rows]
        depths = torch.arange(masks)[None]
        sees = torch.ones(1, masks, masks, dtype=torch.bool).tril()
        fed = TreeLayout(depths, depths, sees, depths).to(self.device)
        ids = torch.full((rows, masks), head.config.mask_token_id, device=self.device)
        positions = (torch.tensor(reached) + 1 + depths).to(self.device)
        hidden = head.fuse(head.mask_hidden).expand(rows, masks, -1)
        try:
            with cache.feeding(fed) as mask:
                output = head(0, ids, hidden, positions, mask, cache)
        finally:
            group.settle()
        logits = head.logits(torch.cat([cache.last[:, None], output], dim=1))
        return product_trees(logits, self.limits.top_k, keep, head.to_target_ids)
