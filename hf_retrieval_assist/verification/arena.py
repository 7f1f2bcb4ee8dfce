"""The keys and values of all layers in tensors of fixed capacity.

Layers whose heads are alike share one tensor `[buffers, batch, heads, capacity, head_dim]`, so that
an accepted path moves to the front in all of them by one gather and one scatter. Layers that forget
what lies beyond their window share others, of a smaller capacity, which begin with a later slot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .slot_layers import Block, Home, SlotLayer, move_in_turn

# The smallest difference of two capacities.
_MIN_STEP = 256

# Up to so many bytes an arena has room for longer texts than the call's: reading them all takes a
# fraction of a millisecond, recording all widths anew takes as long as many steps.
_MOST_ROOMY = 1 << 30
_LEAST_ROOMY = 2048

# Bytes from which on layers share another tensor. Moving a path then takes two launches more, which
# is nothing beside reading so much, and a cache is moved in without twice its memory.
MOST_BYTES = 1 << 30


def capacity_bucket(slots: int) -> int:
    """The capacity that serves this many slots: an eighth of a power of two above at most."""
    step = max(_MIN_STEP, 1 << max(0, (slots - 1).bit_length() - 3))
    return -(-slots // step) * step


def with_room(capacity: int, slot_bytes: int) -> int:
    """The capacity of an arena that is meant to serve later calls too.

    Args:
        capacity: what the call needs.
        slot_bytes: what one slot of all rows and layers takes.
    """
    roomy = max(_LEAST_ROOMY, 1 << (capacity - 1).bit_length())
    return roomy if roomy * slot_bytes <= _MOST_ROOMY else capacity


class _Kind(NamedTuple):
    """What buffers have in common that share a tensor; `part` tells tensors of one kind apart."""

    heads: int
    depth: int
    dtype: torch.dtype
    device: torch.device
    forgets: bool
    part: int


class Arena:
    """Where the layers of some caches write while their memory has to stay where it is.

    Args:
        batch: rows.
        capacity: slots of each row.
        near: the same in layers that forget; None: no layer does.

    Attributes:
        first: the slot with which the buffers of those begin.
    """

    def __init__(self, batch: int, capacity: int, near: int | None = None):
        self.batch, self.capacity, self.near = batch, capacity, near
        self.first = 0
        # By kind the numbers of buffers, of layer i 2i for the keys and 2i + 1 for the values.
        self._members: dict[_Kind, list[int]] = {}
        self._groups: list[torch.Tensor] = []
        # Of each group the one that its present layers write to. One that grows leaves the group.
        self._blocks: list[Block] = []

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self._groups)

    def offer(self, layers: Sequence[SlotLayer]) -> None:
        """Let layers that are empty write here from the beginning, if they are as many as those
        that did so before."""
        if 2 * len(layers) != sum(map(len, self._members.values())):
            return
        self._empty()
        homes = self._homes()
        for i, layer in enumerate(layers):
            if not layer.forgets:
                layer.begin_in(homes[2 * i], homes[2 * i + 1])

    def hold(self, layers: Sequence[SlotLayer]) -> None:
        """Take the content of the layers in and make them write here.

        Layers let go of their own memory as soon as theirs is filled here, so a new arena and a
        cache take no more than one tensor above the larger of them. An arena that held a cache
        before holds another one of the same model: its tensors are used again, emptied, since what
        was not finite in a masked slot would show.
        """
        windows = [layer.window or 0 for layer in layers if layer.forgets]
        first = layers[0].slots.longest - max(windows) + 1 if windows else 0
        members = self._kinds(layers)
        if members != self._members:
            self._members, self._groups, self._blocks = members, [], []
        homes = self._homes()
        begun = [layer for i, layer in enumerate(layers) if homes and layer.is_in(homes[2 * i])]
        if not begun or not all(layer in begun or layer.forgets for layer in layers):
            for layer in begun:
                layer.move_out()
            self._empty()
        self.first = max(0, first)
        move_in_turn(
            ([(layers[n // 2], n % 2) for n in numbers], self._block(i, kind, len(numbers)))
            for i, (kind, numbers) in enumerate(members.items())
        )

    def _block(self, group: int, kind: _Kind, buffers: int) -> Block:
        """That of a group, which is made where it is missing."""
        if group == len(self._groups):
            shape = buffers, self.batch, kind.heads, self._capacity(kind), kind.depth
            self._groups.append(torch.zeros(shape, dtype=kind.dtype, device=kind.device))
            self._blocks.append(Block(self._groups[group]))
        self._blocks[group].put(self._groups[group], self.first if kind.forgets else 0)
        return self._blocks[group]

    def _empty(self) -> None:
        """Leave nothing of earlier caches in the tensors."""
        self._blocks = []
        for group in self._groups:
            group.zero_()
            self._blocks.append(Block(group))

    def _homes(self) -> dict[int, Home]:
        """Buffers by their numbers, as far as they were made."""
        pairs = zip(self._members.values(), self._blocks, strict=False)
        return {n: (block, i) for numbers, block in pairs for i, n in enumerate(numbers)}

    def _kinds(self, layers: Sequence[SlotLayer]) -> dict[_Kind, list[int]]:
        members: defaultdict[_Kind, list[int]] = defaultdict(list)
        taken = 0
        for i, layer in enumerate(layers):
            # Of keys and values together, so that the layer can leave its memory.
            part = taken // MOST_BYTES
            for number, states in enumerate((layer.keys, layer.values), start=2 * i):
                _, heads, _, depth = states.shape
                kind = _Kind(heads, depth, states.dtype, states.device, layer.forgets, part)
                members[kind].append(number)
                slots = self.batch * self._capacity(kind)
                taken += slots * heads * depth * states.element_size()
        return dict(members)

    def _capacity(self, kind: _Kind) -> int:
        return self.near if kind.forgets and self.near is not None else self.capacity

    def move(self, rows: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy slots within rows: int64 [batch, 1] and [batch, moved]."""
        for block in self._blocks:
            block.move(source, destination, rows)

    def begin_with(self, first: int) -> None:
        """Let the buffers of layers that forget begin with a later slot."""
        behind, self.first = first - self.first, first
        for kind, block in zip(self._members, self._blocks, strict=True):
            if kind.forgets and behind:
                block.states[..., :-behind, :] = block.states[..., behind:, :].clone()
                block.put(block.states, first)
