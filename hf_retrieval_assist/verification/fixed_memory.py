"""Memory that stays where it is for the forwards over some caches, lent to call after call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..kernels.fixed_attention import AttentionBy
from .arena import capacity_bucket, with_room
from .kv_cache import SlotCache
from .replay import Record, Shown
from .slot_layers import SlotLayer
from .workspace import WORKSPACES, Repeated, Shape, Workspace


def stays_in_place(device: torch.device) -> bool:
    """Whether forwards on a device are worth memory that stays where it is.

    On a CPU nothing is launched, and views of what is in use are read faster than whole buffers.
    """
    return device.type != "cpu"


def can_stay(cache: SlotCache, device: torch.device) -> bool:
    """Whether a cache can be served in memory that stays where it is.

    Layers with more than keys and values, or spread over devices, go on as they are.
    """
    layers = cache.slot_layers
    return (
        bool(layers)
        and not cache.state_layers
        and all(type(layer) is SlotLayer and layer.keys.device == device for layer in layers)
    )


class FixedMemory:
    """What the layers of some caches write to, and the forwards that are repeated there.

    Args:
        model: for whose next calls the memory is kept.
        layers: of the caches.
        shape: of the memory, with the capacity that will be needed as far as that is known.
        arguments: of the call, which forwards may read.
        recorded: whether forwards may be repeated from a recording.
        prompt_mask: bool [batch, length], which slots of the prompts hold tokens; None: all.
        slots: that each row needs at first.

    Attributes:
        workspace: lent by :data:`~.workspace.WORKSPACES`.
    """

    workspace: Workspace

    def __init__(
        self,
        model: Any,
        layers: Sequence[SlotLayer],
        shape: Shape,
        arguments: Mapping[str, Any],
        *,
        recorded: bool,
        slots: int,
        prompt_mask: torch.Tensor | None = None,
    ) -> None:
        self._model, self._layers, self._shape = model, layers, shape
        self._arguments, self._recorded, self._prompt_mask = arguments, recorded, prompt_mask
        self.grow(slots)

    @property
    def records(self) -> bool:
        """Whether forwards are repeated from recordings."""
        return self.workspace.record is not None

    @property
    def attention_by(self) -> AttentionBy:
        """What computes attention. Code that records itself would go on reading this call's tables,
        so what is compiled and not recorded here keeps the model's own function."""
        shape = self.workspace.shape
        return "mask" if shape.compiled and not self.records else shape.attention_by

    def lacks(self, slots: int) -> bool:
        """Whether rows of so many slots have no room."""
        return slots > self.workspace.shape.capacity

    def grow(self, slots: int) -> None:
        """Go on where rows of so many slots have room; the layers show what is kept."""
        record = self._recorder()
        capacity = capacity_bucket(max(slots, self._shape.capacity))
        if record is not None:
            capacity = with_room(capacity, self._slot_bytes())
        alone = self._shape.compiled and record is None
        by = "mask" if alone else self._shape.attention_by
        shape = replace(self._shape, capacity=capacity, attention_by=by)
        self.workspace = WORKSPACES.lend(self._model, shape, record, self._arguments)
        self.workspace.masks.start(self._prompt_mask)
        self.workspace.arena.hold(self._layers)

    def _recorder(self) -> Record | None:
        """What records forwards; None: nothing does."""
        if not self._recorded:
            return None
        return WORKSPACES.recorder(self._model, self._shape.compiled, self._shape.device)

    def _slot_bytes(self) -> int:
        """What one slot of all rows and layers takes."""
        states = [x for layer in self._layers for x in (layer.keys, layer.values)]
        return sum(x[:, :, :1].numel() * x.element_size() for x in states)

    def show(self, step: Repeated, compute: Callable[[], Shown]) -> Shown:
        """What a forward leaves, repeated where it can be."""
        if not self.records:
            return compute()
        shown = step.replay(compute)
        if (fault := step.replay.fault) is not None:
            WORKSPACES.refuse(self._model, self._shape.compiled, fault)
            self.workspace.record_no_more()
        return shown

    def give_back(self) -> None:
        """Leave it to the model's next calls."""
        WORKSPACES.give_back(self._model, self.workspace, self._arguments)
