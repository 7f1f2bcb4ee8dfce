"""The keys and values of all layers in tensors of fixed capacity.

Layers whose heads are alike share one tensor `[buffers, batch, capacity, heads, head_dim]`, so that
an accepted path moves to the front in all of them by one gather and one scatter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from .kv_cache import SlotLayer

# The smallest difference of two capacities.
_MIN_STEP = 256


def capacity_bucket(slots: int) -> int:
    """The capacity that serves this many slots: an eighth of a power of two above at most."""
    step = max(_MIN_STEP, 1 << max(0, (slots - 1).bit_length() - 3))
    return -(-slots // step) * step


class Arena:
    """Where the layers of one cache write while its memory has to stay where it is.

    Args:
        batch: rows.
        capacity: slots of each row.
        joined: whether layers share tensors. `torch.compile` wants tensors that share no memory.
    """

    def __init__(self, batch: int, capacity: int, joined: bool = True):
        self.batch = batch
        self.capacity = capacity
        self.joined = joined
        self._groups: list[torch.Tensor] = []
        self._shapes: list[tuple[object, ...]] = []

    @property
    def nbytes(self) -> int:
        return sum(group.numel() * group.element_size() for group in self._groups)

    def hold(self, layers: Sequence[SlotLayer]) -> None:
        """Take the content of the layers in and make them write here.

        An arena that held a cache before holds another one of the same model: its tensors are used
        again, emptied, since what was not finite in a masked slot would show.
        """
        members: defaultdict[tuple[object, ...], list[tuple[SlotLayer, int]]] = defaultdict(list)
        for number, layer in enumerate(layers):
            for part, shown in enumerate((layer.keys, layer.values)):
                _, heads, _, depth = shown.shape
                alone = None if self.joined else (number, part)
                members[heads, depth, shown.dtype, shown.device, alone].append((layer, part))
        shapes = [(*kind, len(places)) for kind, places in members.items()]
        if self._shapes != shapes:
            self._groups = [self._empty(*kind[:4], len(at)) for kind, at in members.items()]
            self._shapes = shapes
        else:
            for group in self._groups:
                group.zero_()
        homes: dict[int, list[torch.Tensor]] = {id(layer): [] for layer in layers}
        for group, places in zip(self._groups, members.values(), strict=True):
            for buffer, (layer, _) in zip(group, places, strict=True):
                homes[id(layer)].append(self._home(buffer))
        for layer in layers:
            layer.move_in(homes[id(layer)])

    def _empty(
        self, heads: int, depth: int, dtype: torch.dtype, device: torch.device, buffers: int
    ) -> torch.Tensor:
        shape = (buffers, self.batch, self.capacity, heads, depth)
        return torch.zeros(shape, dtype=dtype, device=device)

    def _home(self, buffer: torch.Tensor) -> torch.Tensor:
        """A layer's view [batch, heads, capacity, head_dim] of one buffer."""
        home = buffer.transpose(1, 2)
        if not self.joined:
            # Graphs that torch captures by itself must not take it for an input to copy.
            torch._dynamo.mark_static_address(home)
        return home

    def move(self, rows: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy slots within rows: int64 [batch, 1] and [batch, moved]."""
        for group in self._groups:
            group[:, rows, destination] = group[:, rows, source]
