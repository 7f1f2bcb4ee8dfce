"""The keys and values of all layers in tensors of fixed capacity.

Layers whose heads are alike share one tensor `[buffers, batch, capacity, heads, head_dim]`, so that
an accepted path moves to the front in all of them by one gather and one scatter. In memory a head's
slots lie behind one another, as in caches of transformers, whose models may count on it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from ..host.transformers_private import keep_address
from .slot_layers import Block, SlotLayer

# The smallest difference of two capacities.
_MIN_STEP = 256


def capacity_bucket(slots: int) -> int:
    """The capacity that serves this many slots: an eighth of a power of two above at most."""
    step = max(_MIN_STEP, 1 << max(0, (slots - 1).bit_length() - 3))
    return -(-slots // step) * step


# Up to so many bytes an arena has room for longer texts than the call's: reading them all takes a
# fraction of a millisecond, recording all widths anew takes as long as many steps.
_MOST_ROOMY = 1 << 30
_LEAST_ROOMY = 2048


def with_room(capacity: int, slot_bytes: int) -> int:
    """The capacity of an arena that is meant to serve later calls too.

    Args:
        capacity: what the call needs.
        slot_bytes: what one slot of all rows and layers takes.
    """
    roomy = max(_LEAST_ROOMY, 1 << (capacity - 1).bit_length())
    return roomy if roomy * slot_bytes <= _MOST_ROOMY else capacity


# Bytes from which on layers share another tensor. Moving a path then takes two launches more, which
# is nothing beside reading so much, and a cache is moved in without twice its memory.
MOST_BYTES = 1 << 30

# Heads, head_dim, dtype, device, and the number of the layers' part.
_Kind = tuple[int, int, torch.dtype, torch.device, int]


class Arena:
    """Where the layers of one cache write while its memory has to stay where it is.

    Args:
        batch: rows.
        capacity: slots of each row.
        apart: whether what a layer sees of a tensor says that it shares no memory with what others
            see, as `torch.compile` wants it.
    """

    def __init__(self, batch: int, capacity: int, apart: bool = False):
        self.batch = batch
        self.capacity = capacity
        self.apart = apart
        self._groups: list[torch.Tensor] = []
        self._members: dict[_Kind, list[int]] = {}

    @property
    def nbytes(self) -> int:
        return sum(group.numel() * group.element_size() for group in self._groups)

    def hold(self, layers: Sequence[SlotLayer]) -> None:
        """Take the content of the layers in and make them write here.

        Layers let go of their own memory as soon as theirs is filled here, so a new arena and a
        cache take no more than one tensor above the larger of them. An arena that held a cache
        before holds another one of the same model: its tensors are used again, emptied, since what
        was not finite in a masked slot would show.
        """
        members = self._kinds(layers)
        if members != self._members:
            self._members, self._groups = members, []
        homes: dict[int, torch.Tensor] = {}
        for i, (kind, numbers) in enumerate(members.items()):
            if i < len(self._groups):
                self._groups[i].zero_()
            else:
                self._groups.append(self._zeros(len(numbers), *kind[:4]))
            homes |= zip(numbers, map(self._home, self._groups[i]), strict=True)
            for layer in {number // 2 for number in numbers}:
                if {2 * layer, 2 * layer + 1} <= homes.keys():
                    pair = homes.pop(2 * layer), homes.pop(2 * layer + 1)
                    layers[layer].move_in(*((Block(home[None]), 0) for home in pair))

    def _kinds(self, layers: Sequence[SlotLayer]) -> dict[_Kind, list[int]]:
        """Which buffers share a tensor: of layer i, 2i holds the keys and 2i + 1 the values."""
        members: defaultdict[_Kind, list[int]] = defaultdict(list)
        taken = 0
        for i, layer in enumerate(layers):
            # Of keys and values together, so that the layer can leave its memory.
            part = taken // MOST_BYTES
            for number, states in enumerate((layer.keys, layer.values), start=2 * i):
                _, heads, _, depth = states.shape
                members[heads, depth, states.dtype, states.device, part].append(number)
                slots = self.batch * self.capacity
                taken += slots * heads * depth * states.element_size()
        return dict(members)

    def _zeros(
        self, buffers: int, heads: int, depth: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        shape = buffers, self.batch, heads, self.capacity, depth
        return torch.zeros(shape, dtype=dtype, device=device).transpose(2, 3)

    def _home(self, buffer: torch.Tensor) -> torch.Tensor:
        """A layer's view [batch, heads, capacity, head_dim] of one buffer."""
        home = buffer.transpose(1, 2)
        if self.apart:
            # Of one memory, but not of one storage, which torch would have to tell apart.
            home = from_dlpack(to_dlpack(home))
            # Graphs that torch captures by itself must not take it for an input to copy.
            keep_address(home)
        return home

    def move(self, rows: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy slots within rows: int64 [batch, 1] and [batch, moved]."""
        for group in self._groups:
            group[:, rows, destination] = group[:, rows, source]
