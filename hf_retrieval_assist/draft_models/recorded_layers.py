"""A head behind texts on an accelerator, in memory that stays in place: a draft is one launch.

What is new in the texts is read by one forward, the tree is grown by another one, all of its levels
in a row at their full width, so that nothing waits for the host before the candidates go back to
it. Slots, positions and masks are made on the device from a few numbers of each text, and each
layer's last hidden states stay there between drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..token_tree import Forest
from ..verification.fixed_memory import FixedMemory
from ..verification.packed_buffer import Field
from ..verification.replay import Record, Shown
from ..verification.workspace import Repeated, Shape
from .features import FeatureSession, stacked
from .growth import BestFirst, Grown, GrowthLimits, Level, run_levels
from .layer_nodes import LayerNodes, Layers
from .rows import Group, Int64Array, parts

# Tokens of each text that one forward reads; more are read in parts.
_WIDTHS = (1, 2, 4, 8, 16, 32, 64)


def _places(shape: Shape) -> dict[str, Field]:
    """Where texts stand: `reached` [rows, 1], the position of a hidden state; `kept`
    [layers, rows, 1], slots in use."""
    layers, rows = shape.states[0], shape.batch
    return {"reached": (torch.int64, (rows, 1)), "kept": (torch.int64, (layers, rows, 1))}


class _Text(Repeated):
    """How texts go on, by up to `width` tokens.

    Attributes:
        inputs: beside places, int64 `token_ids` [rows, width]; `sources` [rows * width], which of
            the new hidden states stands before each; `counts` [rows, 1], of tokens.
        features: [rows, width, feature_width], the target's.
        before: [layers, rows, hidden_size], each layer's last hidden states: a forward that is
            computed again must find what it found before.
    """

    def __init__(self, shape: Shape, record: Record | None, width: int, feature_width: int) -> None:
        rows, (layers, hidden_size) = shape.batch, shape.states
        fields: dict[str, Field] = {
            "token_ids": (torch.int64, (rows, width)),
            "sources": (torch.int64, (rows * width,)),
            "counts": (torch.int64, (rows, 1)),
        }
        super().__init__(fields | _places(shape), shape, record)
        self.features, self.before = (
            torch.zeros(size, dtype=shape.dtype, device=shape.device)
            for size in ((rows, width, feature_width), (layers, rows, hidden_size))
        )


class RecordedLayers:
    """Layers behind the texts of a group, all of which they have begun to read.

    Args:
        module: the layers.
        group: of the texts.
        limits: of a tree.
        feature_width: of the target's hidden states.
        recorded: whether forwards may be repeated from a recording.
    """

    def __init__(
        self,
        module: Layers,
        group: Group,
        limits: GrowthLimits,
        feature_width: int,
        recorded: bool,
    ) -> None:
        self._module, self._group, self._limits = module, group, limits
        self._feature_width = feature_width
        self._rules: list[Any] = [cache.rules for cache in group.caches]
        text: FeatureSession = next(row for row in group.rows if row is not None)
        states: list[Any] = text.last
        shape = Shape(
            batch=len(group.rows),
            capacity=0,
            rules=tuple((str(k), rule) for k, rule in enumerate(self._rules)),
            dtype=module.dtype,
            device=module.device,
            states=(len(states), len(states[0])),
        )
        layers = [layer for cache in group.caches for layer in cache.slot_layers]
        self._memory = FixedMemory(
            *(module, layers, shape, {}), recorded=recorded, slots=self._longest + _WIDTHS[-1]
        )
        for k, state in enumerate(states):
            self._memory.workspace.states[k] = stacked(group.rows, k, state)

    @property
    def _longest(self) -> int:
        return max(cache.slots.longest for cache in self._group.caches)

    @property
    def _lengths(self) -> Int64Array:
        """int64 [layers, rows, 1]"""
        return np.array([cache.slots.lengths for cache in self._group.caches])[..., None]

    def _reserve(self, tokens: int) -> None:
        """Make room for so many tokens behind every text."""
        slots = self._longest + tokens
        if self._memory.lacks(slots):
            self._settle()
            states = self._memory.workspace.states
            self._memory.grow(slots + slots // 4)
            self._memory.workspace.states.copy_(states)

    def follow(self) -> None:
        """Read what is new in the texts."""
        rows = self._group.rows
        counts = [0 if row is None else row.waiting for row in rows]
        if not any(counts):
            return
        pieces = [piece for row in rows if row is not None for piece in row.take()]
        features = torch.cat(pieces).to(self._module.device, self._module.dtype)
        for spans in parts(counts, _WIDTHS[-1]):
            self._follow(features, counts, spans)

    def _follow(self, features: Tensor, counts: Sequence[int], spans: Sequence[range]) -> None:
        """Read a part, of the new hidden states of all texts behind one another."""
        longest = max(map(len, spans))
        width = next(bucket for bucket in _WIDTHS if bucket >= longest)
        self._reserve(width)
        memory, wide = self._memory.workspace, self._feature_width
        step = memory.kept(width, lambda: _Text(memory.shape, memory.record, width, wide))
        self._tell(step, counts, spans)
        sources, found = step.inputs.device["sources"], step.features.flatten(0, 1)
        torch.index_select(features, 0, sources, out=found)
        step.before.copy_(memory.states)
        self._memory.show(step, lambda: self._read(step))
        for cache in self._group.caches:
            pairs = zip(cache.slots.lengths, spans, strict=True)
            cache.slots.set_lengths([length + len(span) for length, span in pairs])

    def _tell(self, step: _Text, counts: Sequence[int], spans: Sequence[range]) -> None:
        """Send what is known of the tokens; those of a text stand in front of what fills it up."""
        step.inputs.wait()
        host = {name: field.numpy() for name, field in step.inputs.host.items()}
        sources = host["sources"].reshape(len(spans), -1)
        # Of another part there may be other hidden states, and fewer.
        sources[:] = 0
        starts = np.cumsum(counts) - counts
        for number, (row, span) in enumerate(zip(self._group.rows, spans, strict=True)):
            if row is None or not len(span):
                continue
            first = row.reached - counts[number] + span.start
            host["reached"][number] = first
            host["token_ids"][number, : len(span)] = row.tokens[first + 1 :][: len(span)]
            sources[number, : len(span)] = starts[number] + np.array(span)
        host["counts"][:, 0] = [len(span) for span in spans]
        host["kept"][:] = self._lengths
        step.inputs.send()

    def _read(self, step: _Text) -> Shown:
        inputs, states = step.inputs.device, self._memory.workspace.states
        rows, width = inputs["token_ids"].shape
        column = torch.arange(width, device=self._module.device)
        sees = (column <= column[:, None]).expand(rows, -1, -1)
        positions = inputs["reached"] + 1 + column
        newest = (inputs["counts"] - 1).clamp_min(0)[..., None].expand(-1, -1, states.shape[2])
        hidden = output = self._module.fuse(step.features)
        for k, cache in enumerate(self._group.caches):
            mask = self.place(k, inputs["kept"][k], column, sees)
            output = self._module.run(k, inputs["token_ids"], hidden, positions, mask, cache)
            last = output.gather(1, newest)[:, 0]
            states[k] = last.where(inputs["counts"] > 0, step.before[k])
            # The next layer reads, before each token, what this one said at the token before it.
            hidden = torch.cat([step.before[k][:, None], output[:, :-1]], dim=1)
        return Shown(output, [], None)

    def place(self, k: int, kept: Tensor, depths: Tensor, sees: Tensor) -> Tensor:
        """Make layer k write tokens behind the texts; returns their mask.

        Args:
            k: from 0.
            kept: int64 [rows, 1], the texts' slots.
            depths: int64 [n], of all tokens behind the texts.
            sees: bool [rows, w, n], which of these each one sees that is written now, the last w.
        """
        (rows, width, count), rule, memory = sees.shape, self._rules[k], self._memory.workspace
        slots = torch.arange(count - width, count, device=kept.device)
        self._group.caches[k].slots.places = memory.rows, kept + slots
        columns = kept + depths
        queries = columns[:, count - width :]
        near = sees & rule.near(queries, columns)
        edge = near.new_ones((rows, width, 1))
        table = torch.cat([edge, near, ~edge], dim=2)
        unseen = None if rule.reach is None else rule.last_unseen(queries)[..., None]
        mask: Tensor = memory.masks.mask(table, unseen, 1 - kept)
        return mask

    def draft(self) -> Forest:
        """A tree below each text, as large as the limits allow."""
        self._reserve(self._limits.depth * self._limits.width)
        memory = self._memory.workspace
        shape, record = memory.shape, memory.record
        step = memory.kept(self._limits, lambda: Repeated(_places(shape), shape, record))
        step.inputs.wait()
        reached = [0 if row is None else row.reached for row in self._group.rows]
        step.inputs.host["reached"].numpy()[:, 0] = reached
        step.inputs.host["kept"].numpy()[:] = self._lengths
        step.inputs.send()
        grown: Grown = self._memory.show(step, lambda: self._grow(step)).outputs
        return grown.trees()

    def _grow(self, step: Repeated) -> Shown:
        keep = self._limits.total - 1
        growth = BestFirst(self._limits, keep, self._module.to_target_ids, whole=True)
        states = self._memory.workspace.states
        run_levels(_FixedNodes(self._module, self, self._group, states, step.inputs.device), growth)
        # A recording may order near ties otherwise, which hardly changes the likeliest paths.
        return Shown(growth.best, [], growth.grown())

    def keep_fed(self, paths: Sequence[Sequence[int]]) -> None:
        """Nodes are never kept: texts are read with the target's hidden states."""

    def show(self) -> None:
        self._settle()
        for row in self._group.rows:
            if row is not None:
                row.last = list(self._memory.workspace.states[:, row.index].clone())

    def _settle(self) -> None:
        for cache in self._group.caches:
            cache.slots.places = None
            for layer in cache.slot_layers:
                layer.show(cache.slots.longest)

    @torch.no_grad()  # as it was recorded
    def release(self) -> None:
        self._settle()
        self._memory.give_back()


class _FixedNodes(LayerNodes):
    """The layers on the nodes of a level, in memory that stays in place.

    Args:
        module: the layers.
        recorded: places what they read.
        group: of the texts.
        states: [layers, rows, hidden_size], at the last tokens of the texts.
        inputs: of the draft.
    """

    def __init__(
        self,
        module: Layers,
        recorded: RecordedLayers,
        group: Group,
        states: Tensor,
        inputs: dict[str, Tensor],
    ) -> None:
        super().__init__(module, [state[:, None] for state in states])
        self._recorded, self._group, self._inputs = recorded, group, inputs
        # Of each layer the depths of the nodes that it has read.
        none = torch.empty(0, dtype=torch.int64, device=states.device)
        self._depths = [none] * len(states)

    def read(self, k: int, level: Level, hidden: Tensor) -> Tensor:
        ids, before = level.token_ids, self._depths[k]
        depths = torch.cat([before, before.new_full((ids.shape[1],), level.depth - 1)])
        self._depths[k] = depths
        # A layer has read all levels so far, or reads no more of them.
        mask = self._recorded.place(k, self._inputs["kept"][k], depths, level.visible)
        positions = (self._inputs["reached"] + level.depth).expand_as(ids)
        return self._module.run(k, ids, hidden, positions, mask, self._group.caches[k])
