"""Drafts of the target's own multi-token-prediction layers, as a tree."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..drafters.base import FeedbackNeeds, Target
from ..host.ranks import require_whole
from .features import FeatureDrafter, FeatureSession
from .growth import GrowthLimits
from .layers_follower import LayersFollower
from .mtp_layers import mtp_layers

# Levels drafted by feeding the last layer its own output, unless a caller says otherwise.
_RECURSIONS = 3


class MtpDrafter(FeatureDrafter):
    """Drafts with the multi-token-prediction layers that a checkpoint brings along.

    Layer k drafts level k + 1 of the tree (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2); below
    the last layer's level that layer goes on with its own output. A layer with a convolution
    state expands only the likeliest node of each level, since it reads tokens in a row.

    Args:
        top_k: children of a node, and nodes expanded in a level.
        depth: levels below the first; None: one for each further layer, and three more.
        total: nodes of the tree with its root, so at most `total - 1` are proposed.
        min_prob: nodes held less likely than this to be reached are not expanded.

    Raises:
        ValueError: a size is out of range; from `start`, the target has no such layers.
    """

    name = "mtp"
    needs = FeedbackNeeds(hidden_layers=(-1,))

    def __init__(
        self,
        top_k: int = 8,
        depth: int | None = None,
        total: int = 60,
        min_prob: float = 0.01,
    ) -> None:
        self.limits = GrowthLimits(top_k, top_k, 0 if depth is None else depth, total, min_prob)
        self.depth = depth

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> FeatureSession:
        model = target.require_model("fallback 'mtp'")
        require_whole(model, "fallback 'mtp'")
        layers = mtp_layers(model)
        depth = len(layers) - 1 + _RECURSIONS if self.depth is None else self.depth
        width = self.limits.width if layers.takes_trees else 1
        limits = replace(self.limits, width=width, depth=depth)
        follower = LayersFollower(layers, limits, layers.config.hidden_size, target.graphs)
        return FeatureSession(follower, prompt_ids, limits.total - 1)
