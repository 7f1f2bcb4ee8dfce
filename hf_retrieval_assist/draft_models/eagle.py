"""Drafts of an EAGLE head: the dynamic tree of EAGLE-2 over the target's own features."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..drafters.base import FeedbackNeeds, Target
from .eagle_head import EagleHead
from .features import FeatureDrafter, FeatureSession
from .growth import GrowthLimits
from .layers_follower import LayersFollower


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
        target.require_ids("EAGLE head", config.vocab_size - 1)
        target.require_width("EAGLE head", config.target_width)
        follower = LayersFollower(self.head, self.limits, config.feature_width, target.graphs)
        return FeatureSession(follower, prompt_ids, self.limits.total - 1)
