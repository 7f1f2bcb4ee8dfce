"""Static buffers for the forwards over some caches, lent to call after call."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ...cache.kv_cache import SlotCache
from ...cache.slot_layers import SlotLayer
from ...host.model_key import recording_key
from ...system.memory import SHORTAGES
from ...verification.recordings import Borrower
from .arena import Shape, capacity_bucket, with_room
from .replay import Shown
from .workspace import MOST_MOVED, WORKSPACES, Repeated, Workspace

# Where forwards are recorded, or attention reads nothing but the slots in use.
_STAYING = ("cuda",)


def stays_in_place(device: torch.device) -> bool:
    """Whether forwards on a device are worth static buffers; elsewhere views of what
    is in use are read faster than whole buffers."""
    return device.type in _STAYING


def can_stay(cache: SlotCache, device: torch.device) -> bool:
    """Whether a cache can be served in static buffers.

    Layers with more than keys and values, or spread over devices, go on as they are.
    """
    layers = cache.slot_layers
    return (
        bool(layers)
        and not cache.state_layers
        and all(type(layer) is SlotLayer and layer.keys.device == device for layer in layers)
    )


class FixedMemory(Borrower[Workspace]):
    """What the layers of some caches write to, and the forwards that are repeated there.

    Meanwhile layers show no lengths, and what a cache keeps of a forward is moved with the next.

    Args:
        model: for whose next calls the memory is kept.
        caches: of the same rows.
        shape: of the memory, with the capacity that will be needed as far as that is known.
        arguments: of the call, which forwards may read.
        recorded: whether forwards may be repeated from a recording.
        room: tokens that there is room for behind each row, whenever memory is taken.
        prompt_mask: bool [batch, length], which slots of the prompts hold tokens; None: all.
        reserved: what the layers were filled in, where that was done in static buffers.

    Attributes:
        workspace: lent by :data:`~.workspace.WORKSPACES`.
        moves: of kept paths, from where and to where: int64 [2, batch, moved].
    """

    _told = logging.WARNING, "run one kernel at a time"
    workspace: Workspace

    def __init__(
        self,
        model: Any,
        caches: Sequence[SlotCache],
        shape: Shape,
        arguments: Mapping[str, Any],
        *,
        recorded: bool,
        room: int,
        prompt_mask: torch.Tensor | None = None,
        reserved: Workspace | None = None,
    ) -> None:
        read = partial(recording_key, model, arguments, shape.device)
        recorded = recorded and not WORKSPACES.skips(model)
        super().__init__(WORKSPACES, model, read if recorded else None)
        self._caches, self._shape, self._room = caches, shape, room
        self._prompt_mask = prompt_mask
        self._layers = [layer for cache in caches for layer in cache.slot_layers]
        self.moves = self._still = np.empty((2, shape.batch, 0), np.int64)
        self.grow(self._longest + room, reserved)
        for cache in caches:
            # A weak reference makes no circle, so that what a verifier holds goes with it.
            cache.memory = weakref.proxy(self)

    @property
    def records(self) -> bool:
        """Whether forwards are repeated from recordings."""
        workspace = self.workspace
        return self._state is not None and workspace.record is not None and not workspace.short

    @property
    def _longest(self) -> int:
        return max(cache.slots.longest for cache in self._caches)

    def reserve(self, tokens: int) -> None:
        """Make room for so many tokens behind every row."""
        slots, arena = self._longest + tokens, self.workspace.arena
        near = self.workspace.shape.near
        if slots > self.workspace.shape.capacity:
            self.show()
            states = self.workspace.states
            self._move_on(slots)
            self.workspace.states.copy_(states)
        elif near is not None and slots - arena.first > near:
            self.move()
            arena.begin_with(max(0, self._longest - (self._shape.window or 0) + 1))

    def _move_on(self, slots: int) -> None:
        """Go on where there is room for so many slots, and for more if memory suffices."""
        short = False
        try:
            self.grow(slots + slots // 4 + self._room)
        except SHORTAGES:
            short = True
        if short:  # the error keeps nothing alive by now
            WORKSPACES.release(self.model)
            self.grow(slots + self._room)

    def move_later(self, lengths: Sequence[int], sources: Sequence[Sequence[int]]) -> None:
        """Move paths with the next forward, see :func:`~...cache.kv_cache.moved_from`."""
        self.move()
        base = np.asarray(lengths, np.int64)[:, None]
        self.moves = np.stack([base + np.asarray(sources), base + np.arange(len(sources[0]))])
        if len(sources[0]) > MOST_MOVED:
            self.move()

    def move(self, told: torch.Tensor | None = None) -> None:
        """Move kept paths, now instead of with the next forward unless that has told of them."""
        if self.moves.shape[2]:
            moves = torch.from_numpy(self.moves).to(self._shape.device) if told is None else told
            self.workspace.arena.move(self.workspace.rows, *moves)
            self.moves = self._still

    def show(self) -> None:
        """Make the layers show what is kept, as those of other caches do."""
        self.move()
        for cache in self._caches:
            for layer in cache.slot_layers:
                layer.set_length(cache.slots.longest)

    def detach(self) -> None:
        """Leave the caches as others are, though their layers lie here."""
        self.show()
        for cache in self._caches:
            cache.memory = None

    @torch.no_grad()  # the recording's mode
    def release(self) -> None:
        """Serve the caches no longer, and whoever drafts next."""
        self.detach()
        self.give_back()

    def grow(self, slots: int, reserved: Workspace | None = None) -> None:
        """Go on where rows of so many slots have room; the layers show what is kept."""
        capacity = capacity_bucket(max(slots, self._shape.capacity))
        if self._state is not None:
            capacity = with_room(capacity, self._slot_bytes())
        shape = replace(self._shape, capacity=capacity)
        self.workspace = WORKSPACES.workspace(self.model, shape, self._state, reserved)
        self.workspace.masks.start(self._prompt_mask)
        self.workspace.hold(self._layers)
        if reserved is not None and reserved is not self.workspace:
            # Nothing lies there any more. What was recorded there may serve the next call.
            WORKSPACES.give_back(self.model, reserved, spared=0)

    def _slot_bytes(self) -> int:
        """What one slot of all rows and layers takes."""
        states = [x for layer in self._layers for x in (layer.keys, layer.values)]
        return sum(x[:, :, :1].numel() * x.element_size() for x in states)

    def run(self, step: Repeated, compute: Callable[[], Shown]) -> Shown:
        """What a forward leaves, repeated where it can be."""
        if not self.records:
            return compute()
        return self._run(self.workspace, step, compute)

    def give_back(self) -> None:
        """Leave it to the model's next calls."""
        self._give_back(self.workspace)
