"""Layers behind texts in static buffers, where their forwards are recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ...draft_models.growth import BestFirst, Grown, by_probability
from ...draft_models.rows import Group
from ...engines.cuda.arena import Shape
from ...engines.cuda.fixed_memory import FixedMemory
from ...engines.cuda.packed_buffer import Field
from ...engines.cuda.replay import Shown
from ...engines.cuda.workspace import Repeated
from ...types.token_tree import Forest
from ...verification.tree_attention import Int64Array
from .features import NewText
from .layers_follower import WIDTHS, LayerNodes, LayersFollower

Step = TypeVar("Step", bound=Repeated)


class _Text(Repeated):
    """How texts go on.

    Attributes:
        features: [rows, width, feature_width], the target's hidden state before each token.
    """

    features: Tensor | None = None


class RecordedLayers:
    """The layers behind the texts of a group, all of which they have begun to read."""

    def __init__(self, follower: LayersFollower, group: Group) -> None:
        self._module, self._limits = follower.module, follower.limits
        self._caches, self._rows = group.caches, group.rows
        states: list[Any] = [cache.last for cache in group.caches]
        rules: Any = {str(k): cache.rules for k, cache in enumerate(group.caches)}
        shape = Shape(
            batch=len(group.rows),
            capacity=0,
            rules=rules,
            dtype=follower.dtype,
            device=follower.device,
            states=(len(states), states[0].shape[1]),
        )
        self.memory = FixedMemory(
            *(self._module, group.caches, shape, {}), recorded=follower.graphs, room=WIDTHS[-1]
        )
        for place, said in zip(self.memory.workspace.states, states, strict=True):
            place.copy_(said)

    def _step(self, key: Any, kind: type[Step], values: Mapping[str, Int64Array]) -> Step:
        """What is repeated for a key, its inputs sent, with where the texts' slots end."""
        lengths = np.array([cache.slots.lengths for cache in self._caches])
        told = {**values, "kept": lengths[..., None]}
        fields: dict[str, Field] = {n: (torch.int64, value.shape) for n, value in told.items()}
        memory = self.memory.workspace
        # What the layers said last lies there too.
        for cache, said in zip(self._caches, memory.states, strict=True):
            cache.last = said
        step = memory.cached(key, lambda: kind(fields, memory.shape, memory.record))
        step.inputs.wait()
        for name, value in told.items():
            step.inputs.host[name].numpy()[:] = value
        step.inputs.send()
        return step

    def _begin(self, inputs: Mapping[str, Tensor]) -> None:
        """What follows reads and writes the memory behind what is kept of each text."""
        for cache, kept in zip(self._caches, inputs["kept"], strict=True):
            cache.held = self.memory.workspace, kept

    def follow(self, text: NewText) -> None:
        """Read what is new in the texts."""
        rows, width = text.token_ids.shape
        self.memory.reserve(width)
        values = {
            "token_ids": text.token_ids,
            "positions": text.positions + 1,
            "sources": text.sources.ravel(),
            "fills": width - np.array(text.counts)[:, None],
        }
        step = self._step(width, _Text, values)
        if step.features is None:
            step.features = text.features.new_zeros((rows, width, text.features.shape[1]))
        features, inputs = step.features, step.inputs.device
        torch.index_select(text.features, 0, inputs["sources"], out=features.flatten(0, 1))
        shown = self.memory.run(step, lambda: self._read(inputs, features))
        # Only now: a forward that is computed again must find what it found before.
        self.memory.workspace.states.copy_(shown.outputs)
        for cache in self._caches:
            cache.keep([range(count) for count in text.counts])

    def _read(self, inputs: dict[str, Tensor], features: Tensor) -> Shown:
        self._begin(inputs)
        hidden, said = self._module.fuse(features), []
        given = inputs["positions"], inputs["fills"]
        for k, cache in enumerate(self._caches):
            hidden, state = self._module.read(k, cache, inputs["token_ids"], hidden, *given)
            said.append(state)
        return Shown(hidden, {}, torch.stack(said))

    def draft(self) -> Forest:
        """A tree below each text, as large as the limits allow."""
        self.memory.reserve(self._limits.depth * self._limits.width)
        reached = np.array([[0 if row is None else row.reached] for row in self._rows])
        step = self._step(self._limits, Repeated, {"reached": reached})
        grown: Grown = self.memory.run(step, lambda: self._grow(step.inputs.device)).outputs
        return grown.trees(by_probability)

    def _grow(self, inputs: dict[str, Tensor]) -> Shown:
        self._begin(inputs)
        keep = self._limits.total - 1
        growth = BestFirst(self._limits, keep, self._module.to_target_ids, whole=True)
        known = len(self._caches)
        growth.grow(LayerNodes(self._module, self._caches, known, inputs["reached"]).run)
        # A recording may order near ties otherwise, which hardly changes the likeliest paths.
        return Shown(growth.best, {}, growth.grown())
