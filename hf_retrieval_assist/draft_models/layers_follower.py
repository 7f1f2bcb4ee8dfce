"""EAGLE heads and MTP layers: they read a text's tokens beside the target's hidden states."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..token_tree import TokenTree
from ..verification.fixed_memory import can_stay, stays_in_place
from ..verification.states import state_of
from .features import FeatureSession, Follower, NewText, remember, stacked
from .growth import BestFirst, GrowthLimits, Level, grow
from .layer_nodes import LayerNodes, Layers
from .recorded_layers import RecordedLayers
from .rows import DraftCache, Group, chain, last_columns


class LayersFollower(Follower):
    """The layers behind texts, with a cache for each layer; an EAGLE head counts as one.

    A layer has read every token of the text whose chain of hidden states begins at a feature: layer
    k starts k tokens after the first. On an accelerator the layers run in memory that stays in
    place from the first draft on that all of them have read something for.

    Args:
        layers: shared with other sessions.
        limits: of a tree.
        feature_width: of the target's hidden states.
        graphs: whether forwards may be recorded where they stay in place.
    """

    def __init__(
        self, layers: Layers, limits: GrowthLimits, feature_width: int, graphs: bool
    ) -> None:
        self.module, self.limits, self._graphs = layers, limits, graphs
        self.layers = len(layers)
        self.feature_width = feature_width
        self.device, self.dtype = layers.device, layers.dtype

    def caches(self) -> list[DraftCache]:
        return [self.module.cache(k) for k in range(self.layers)]

    def catch_up(self, group: Group) -> None:
        if (recorded := _recorded(group)) is not None:
            recorded.follow()
            return
        super().catch_up(group)
        self._stay(group)

    def _stay(self, group: Group) -> None:
        """Go on in memory that stays in place, once there is something to hold in all of it."""
        texts = [row for row in group.rows if row is not None]
        if (
            stays_in_place(self.device)
            and all(can_stay(cache, self.device) for cache in group.caches)
            and all(state is not None for row in texts for state in row.last)
        ):
            group.recorded = RecordedLayers(
                self.module, group, self.limits, self.feature_width, self._graphs
            )

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

    def draft(
        self, group: Group, asked: Sequence[FeatureSession], keep: int
    ) -> Sequence[TokenTree]:
        self.catch_up(group)
        if (recorded := _recorded(group)) is not None:
            return recorded.draft()
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
    ) -> Sequence[TokenTree]:
        growth = BestFirst(self.limits, keep, self.module.to_target_ids)
        # What a draft may overwrite and `settle` does not bring back.
        layers = [layer for cache in group.caches for layer in cache.layers]
        states = [] if self.module.takes_trees else [state_of(layer) for layer in layers]
        try:
            return grow(_GroupNodes(self.module, group, rows[0], known), growth)
        finally:
            group.settle()
            for layer, state in zip(layers, states, strict=False):
                layer.__dict__.update(state)


def _recorded(group: Group) -> RecordedLayers | None:
    recorded: Any = group.recorded
    return recorded


class _GroupNodes(LayerNodes):
    """The layers behind the texts of a group, in their caches.

    Args:
        module: the layers.
        group: of the texts.
        like: one of the texts.
        known: layers that have read something of them.
    """

    def __init__(self, module: Layers, group: Group, like: FeatureSession, known: int) -> None:
        states: list[Any] = like.last[:known]
        above = [stacked(group.rows, k, state)[:, None] for k, state in enumerate(states)]
        super().__init__(module, above)
        self._group = group
        reached = [0 if row is None else row.reached for row in group.rows]
        self._positions = torch.tensor(reached, device=module.device)[:, None]

    def read(self, k: int, level: Level, hidden: Tensor) -> Tensor:
        cache, (rows, width) = self._group.caches[k], level.token_ids.shape
        attends = level.visible[:, :, level.visible.shape[2] - cache.drafted - width :]
        mask = cache.feed(np.full((rows, width), level.depth - 1), attends)
        positions = (self._positions + level.depth).expand(-1, width)
        return self._module.run(k, level.token_ids, hidden, positions, mask, cache)
