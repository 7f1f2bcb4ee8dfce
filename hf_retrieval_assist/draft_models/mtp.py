"""Drafts of the target's own multi-token-prediction layers, as a tree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..drafters.base import FeedbackNeeds, Target
from ..host.ranks import require_whole
from ..token_tree import TokenTree
from ..verification.states import state_of
from .eagle_head import EagleHead
from .features import FeatureDrafter, FeatureSession, Follower, NewText, remember, stacked
from .growth import BestFirst, GrowthLimits, Level, grow
from .mtp_head import MtpHead
from .mtp_layers import MtpLayers, mtp_layers
from .rows import DraftCache, Group, chain, last_columns

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
        head: trained for a target that has none; None: the target's own, from its checkpoint.

    Raises:
        ValueError: a size is out of range; from `start`, the target has no such layers, or the
            head is for another target.
    """

    name = "mtp"
    needs = FeedbackNeeds(hidden_layers=(-1,))

    def __init__(
        self,
        top_k: int = 8,
        depth: int | None = None,
        total: int = 60,
        min_prob: float = 0.01,
        head: MtpHead | None = None,
    ) -> None:
        self.limits = GrowthLimits(top_k, top_k, 0 if depth is None else depth, total, min_prob)
        self.depth = depth
        self.head = head

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> FeatureSession:
        layers = self._layers_for(target)
        follower = LayersFollower(layers, self._limits_for(layers), layers.hidden_size)
        return FeatureSession(follower, prompt_ids, self.limits.total - 1)

    def _layers_for(self, target: Target) -> MtpLayers:
        if self.head is not None:
            target.require_ids("MTP head", self.head.vocab_size)
            target.require_width("MTP head", self.head.hidden_size)
            return self.head
        model = target.require_model("fallback 'mtp'")
        require_whole(model, "fallback 'mtp'")
        return mtp_layers(model)

    def _limits_for(self, layers: MtpLayers) -> GrowthLimits:
        depth = len(layers) - 1 + _RECURSIONS if self.depth is None else self.depth
        width = self.limits.width if layers.takes_trees else 1
        return replace(self.limits, width=width, depth=depth)


class LayersFollower(Follower):
    """The layers behind texts, with a cache for each layer; an EAGLE head counts as one.

    A layer has read every token of the text whose chain of hidden states begins at a feature: layer
    k starts k tokens after the first.
    """

    def __init__(
        self, layers: MtpLayers | EagleHead, limits: GrowthLimits, feature_width: int
    ) -> None:
        self.module, self.limits = layers, limits
        self.layers = len(layers)
        self.feature_width = feature_width
        self.device, self.dtype = layers.device, layers.dtype

    def caches(self) -> list[DraftCache]:
        return [self.module.cache(k) for k in range(self.layers)]

    def follow(self, group: Group, text: NewText) -> None:
        """Run all layers, given the target's hidden states before each token."""
        hidden, counts = self.module.fuse(text.features), list(text.counts)
        positions = text.positions + 1
        for k in range(self.layers):
            if not any(counts):
                return
            # Layers with a convolution state read every column, so there is none to fill up.
            newest = slice(-max(counts), None)
            hidden, positions = hidden[:, newest], positions[:, newest]
            output = self._read(group, k, text.token_ids[:, newest], hidden, positions, counts)
            before = [row and row.last[k] for row in group.rows]
            remember(group, k, counts, output)
            if k + 1 == self.layers:
                return
            # The next layer reads, before each token, what this one said at the token before it.
            hidden = output.roll(1, dims=1)
            for number, state in enumerate(before):
                if state is not None:
                    hidden[number, -counts[number]] = state
                elif counts[number]:
                    counts[number] -= 1

    def _read(
        self,
        group: Group,
        k: int,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        counts: Sequence[int],
    ) -> Tensor:
        """Run a layer over the newest tokens of texts and keep their entries."""
        cache = group.caches[k]
        for number, count in enumerate(counts):
            if count and not cache.slots.lengths[number]:
                cache.firsts[number] = int(positions[number, -count])
        mask = cache.feed(*chain(counts, hidden.device))
        output = self.module.run(k, token_ids, hidden, positions, mask, cache)
        cache.keep(last_columns(counts))
        return output

    def draft(self, group: Group, asked: Sequence[FeatureSession], keep: int) -> list[TokenTree]:
        self.catch_up(group)
        # Texts that are too short for the further layers are drafted for without these.
        alike: defaultdict[int, list[FeatureSession]] = defaultdict(list)
        for row in asked:
            alike[sum(state is not None for state in row.last)].append(row)
        trees = [TokenTree.empty()] * len(group.rows)
        for known, rows in alike.items():
            found = self._grow(group, rows, known, keep)
            for row in rows:
                trees[row.index] = found[row.index]
        return trees

    def _grow(
        self, group: Group, rows: Sequence[FeatureSession], known: int, keep: int
    ) -> list[TokenTree]:
        growth = BestFirst(self.limits, keep, self.module.to_target_ids)
        # What a draft may overwrite and `settle` does not bring back.
        layers = [layer for cache in group.caches for layer in cache.layers]
        states = [] if self.module.takes_trees else [state_of(layer) for layer in layers]
        try:
            return grow(_Nodes(self.module, group, rows[0], known), growth)
        finally:
            group.settle()
            for layer, state in zip(layers, states, strict=False):
                layer.__dict__.update(state)


class _Nodes:
    """The layers on the nodes of a level.

    Args:
        module: the layers.
        group: of the texts.
        like: one of the texts.
        known: layers that have read something of them.
    """

    def __init__(
        self, module: MtpLayers | EagleHead, group: Group, like: FeatureSession, known: int
    ) -> None:
        self._module, self._group = module, group
        # Of each layer [rows, f, hidden_size] at the nodes of the level above.
        self._above: list[Tensor | None] = [None] * len(module)
        for k in range(known):
            state: Any = like.last[k]
            self._above[k] = stacked(group.rows, k, state)[:, None]
        reached = [0 if row is None else row.reached for row in group.rows]
        self._positions = torch.tensor(reached, device=module.device)[:, None]

    def root_logits(self) -> Tensor:
        return self._logits(self._above[0])

    def run(self, level: Level) -> Tensor:
        """See `NodeRunner`.

        Layer `depth` gives the logits. The further layers read the nodes as well, because deeper
        nodes attend to them there.
        """
        last = len(self._module) - 1
        below: list[Tensor | None] = [None] * len(self._module)
        for k in range(min(level.depth, last), last + 1):
            # Past its own level the last layer goes on with its own output.
            hidden = self._above[k - 1 if level.depth <= last else k]
            if hidden is None:
                # The texts are so short that the layer cannot read these nodes yet.
                break
            below[k] = self._read(k, level, hidden)
        self._above = below
        return self._logits(below[min(level.depth, last)])

    def _logits(self, hidden: Tensor | None) -> Tensor:
        assert hidden is not None
        return self._module.logits(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])

    def _read(self, k: int, level: Level, hidden: Tensor) -> Tensor:
        """Run a layer over a level behind the nodes that it has read."""
        cache, (rows, width) = self._group.caches[k], level.token_ids.shape
        attends = level.visible[:, :, level.visible.shape[2] - cache.drafted - width :]
        mask = cache.feed(np.full((rows, width), level.depth - 1), attends)
        states = hidden.gather(1, level.parent_rows[..., None].expand(-1, -1, hidden.shape[2]))
        positions = (self._positions + level.depth).expand(-1, width)
        return self._module.run(k, level.token_ids, states, positions, mask, cache)
