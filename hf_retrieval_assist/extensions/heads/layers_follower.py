"""EAGLE heads and MTP layers: they read a text's tokens beside the target's hidden states.

On a CPU the layers' caches grow and each level of a tree is a forward. On an accelerator they stay
in place, and a draft is two launches: one forward reads what is new in the texts, another one grows
the tree, all of its levels in a row at their full width, so that nothing waits for the host before
the candidates go back to it. Slots, positions and masks are made there from a few numbers of each
text, and the layers' last hidden states stay there between drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...cache.states import state_of
from ...draft_models.growth import BestFirst, GrowthLimits, Level, by_probability
from ...draft_models.rows import DraftCache, Group, fed_texts, fills_of
from ...plugins import load
from ...types.token_tree import Forest, TokenTree
from ...verification.engine import engine_of
from .features import FeatureSession, Follower, NewText

# Tokens of each text that one forward reads in static buffers; more are read in parts.
WIDTHS = (1, 2, 4, 8, 16, 32, 64)


class Layers(nn.Module):
    """Layers that draft, each with a cache and an output of its own; the blocks of an EAGLE head
    count as one. Drafting only reads them, so any number of threads may use them.

    A layer, counted from 0, is run over n tokens of each of B texts by `forward(layer, ids, hidden,
    positions, mask, cache)`: int64 [B, n], of the target's vocabulary; [B, n, hidden_size] at the
    token before each, of `fuse` or of the layer before, or, below the levels that have one, of the
    layer itself; int64 [B, n], of the tokens; additive, None where nothing is masked; and what
    receives the new entries. It returns [B, n, hidden_size], for `logits` or the next layer.

    Attributes:
        takes_trees: whether every layer keeps one entry per token and nothing else.
    """

    takes_trees = True

    def __len__(self) -> int:
        return 1

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def cache(self, layer: int) -> DraftCache:
        """An empty cache of a layer over one text."""
        raise NotImplementedError

    def fuse(self, features: Tensor) -> Tensor:
        """Target features [..., feature_width] to hidden inputs [..., hidden_size] of layer 0."""
        return features

    def read(
        self,
        k: int,
        cache: DraftCache,
        ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        fills: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Run layer k over new tokens of texts, w of each.

        Args:
            cache: of the layer.
            ids, positions: int64 [rows, w].
            hidden: [rows, w, hidden_size], before each token.
            fills: int64 [rows or 1, 1], how many of the first columns only fill a line up.

        Returns:
            [rows, w, hidden_size], the same for the next layer; and what layer k says of the last
            token of each text, [rows, hidden_size].
        """
        width = ids.shape[1]
        fed = fed_texts(fills, width)
        with cache.feeding(fed) as mask:
            output = self(k, ids, hidden, positions, mask, cache)
        said = output[:, -1]
        before = torch.zeros_like(said) if cache.last is None else cache.last
        # The next layer reads, before each token, what this one said at the token before it.
        begins = (fed.columns == fills)[..., None]
        following = before[:, None].where(begins, output.roll(1, dims=1))
        return following, said.where(fills < width, before)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., ids], from outputs [..., hidden_size] of any layer."""
        raise NotImplementedError

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Ids of the target's vocabulary for columns of the logits; any shape."""
        return draft_ids


class LayersFollower(Follower):
    """The layers behind texts, with a cache for each layer.

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
        self.module, self.limits, self.graphs = layers, limits, graphs
        self.feature_width = feature_width
        self.device, self.dtype = layers.device, layers.dtype

    def caches(self) -> list[DraftCache]:
        return [self.module.cache(k) for k in range(len(self.module))]

    def catch_up(self, group: Group) -> None:
        if group.static_drafts is not None:
            for text in self.waiting(group, WIDTHS[-1], WIDTHS):
                group.static_drafts.follow(text)
            return
        super().catch_up(group)
        if _may_stay(group, self.device):
            group.static_drafts = load("parts", "recorded_layers")(self, group)

    def follow(self, group: Group, text: NewText) -> None:
        """Run all layers, given the target's hidden states before each token."""
        ids, positions, sources = (
            torch.from_numpy(x).to(self.device)
            for x in (text.token_ids, text.positions + 1, text.sources)
        )
        hidden = self.module.fuse(text.features[sources])
        fills = [ids.shape[1] - count for count in text.counts]
        for k, cache in enumerate(group.caches):
            # Layers with a convolution state read every column, so none may be filled up.
            spare = min(fills)
            ids, positions, hidden = (x[:, spare:] for x in (ids, positions, hidden))
            width, fills = ids.shape[1], [fill - spare for fill in fills]
            if not width:
                return
            begins = [not length for length in cache.slots.lengths]
            if begins[0]:
                cache.first = int(positions[0, 0])
            fillers = fills_of(fills, self.device)
            hidden, cache.last = self.module.read(k, cache, ids, hidden, positions, fillers)
            cache.keep([range(width - fill) for fill in fills])
            # There is nothing for the next layer to read before this one's first token.
            fills = [min(width, f + begun) for f, begun in zip(fills, begins, strict=True)]

    def draft(
        self, group: Group, asked: Sequence[FeatureSession], keep: int
    ) -> Sequence[TokenTree]:
        self.catch_up(group)
        if group.static_drafts is not None:
            return group.static_drafts.draft()
        # Texts that are too short for the further layers are drafted for without these.
        lengths = zip(*(cache.slots.lengths for cache in group.caches), strict=True)
        known = [sum(length > 0 for length in of_layers) for of_layers in lengths]
        found = {k: self._grow(group, k, keep) for k in {known[row.index] for row in asked}}
        nothing = TokenTree.empty()
        return [found[k][row] if k in found else nothing for row, k in enumerate(known)]

    def _grow(self, group: Group, known: int, keep: int) -> Forest:
        growth = BestFirst(self.limits, keep, self.module.to_target_ids)
        reached = [0 if row is None else row.reached for row in group.rows]
        places = torch.tensor(reached, device=self.device)[:, None]
        # What a draft may overwrite and `settle` does not bring back.
        layers = [layer for cache in group.caches for layer in cache.layers]
        kept = [] if self.module.takes_trees else [state_of(layer) for layer in layers]
        try:
            growth.grow(LayerNodes(self.module, group.caches, known, places).run)
            return growth.grown().trees(by_probability)
        finally:
            group.settle()
            for layer, state in zip(layers, kept, strict=False):
                layer.__dict__.update(state)


def _may_stay(group: Group, device: torch.device) -> bool:
    """Whether there is something to hold in all of the memory."""
    texts = [row.index for row in group.rows if row is not None]
    return all(
        engine_of(device).holds(cache) and all(cache.slots.lengths[row] for row in texts)
        for cache in group.caches
    )


class LayerNodes:
    """The layers behind some texts and on the nodes of a level.

    Args:
        module: the layers.
        caches: with the texts, each with what its layer said last.
        known: how many layers have read something of the texts.
        reached: int64 [rows, 1], positions of the last tokens' hidden states.
    """

    def __init__(
        self, module: Layers, caches: Sequence[DraftCache], known: int, reached: Tensor
    ) -> None:
        self._module, self._caches, self._reached = module, caches, reached
        # Each layer's [rows, f, hidden_size] at the nodes of the level above, if it has read them.
        said: list[Any] = [cache.last for cache in caches[:known]]
        self._above = {k: state[:, None] for k, state in enumerate(said)}
        # Nodes that were run before each layer began to read them.
        self._missing: dict[int, int] = {}

    def run(self, level: Level | None) -> Tensor:
        """A `Run`.

        Layer `depth` gives the logits. The further layers read the nodes as well, because deeper
        nodes attend to them there.
        """
        if level is None:
            return self._logits(0)
        last = len(self._module) - 1
        first, below = min(level.depth, last), {}
        positions = (self._reached + level.depth).expand_as(level.token_ids)
        for k in range(first, last + 1):
            # The last layer goes on with its own output past its own level.
            hidden = self._above.get(k - 1 if level.depth <= last else k)
            if hidden is None:
                # The texts are so short that the layer cannot read these nodes yet.
                break
            parents = level.parent_rows[..., None].expand(-1, -1, hidden.shape[2])
            # A layer has read all levels since, or reads no more of them.
            missing = self._missing.setdefault(k, len(level.columns) - parents.shape[1])
            hidden, cache = hidden.gather(1, parents), self._caches[k]
            with cache.feeding(level.fed(missing)) as mask:
                below[k] = self._module(k, level.token_ids, hidden, positions, mask, cache)
        self._above = below
        return self._logits(first)

    def _logits(self, layer: int) -> Tensor:
        hidden = self._above[layer]
        return self._module.logits(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
