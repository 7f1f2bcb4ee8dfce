"""The keys and values of all layers in tensors of fixed capacity.

Layers whose heads are alike share one tensor `[buffers, batch, heads, capacity, head_dim]`, so that
an accepted path moves to the front in all of them by one gather and one scatter. Layers that forget
what lies beyond their window share others, of a smaller capacity, which begin with a later slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ...cache.blocks import Block, BlockRef, BlockShape
from ...cache.slot_layers import SlotLayer, attach_in_turn, kinds_of
from ...host.feature_taps import HiddenLayers
from ...verification.tree_attention import Rules

# The smallest difference of two capacities.
_MIN_STEP = 256

# An arena of up to so many bytes has room for longer texts than the call's: reading them all takes
# a fraction of a millisecond, recording all widths anew takes as long as many steps.
_MOST_ROOMY = 1 << 30
_LEAST_ROOMY = 2048

# Bytes from which on layers share another tensor. Moving a path then takes two launches more, which
# is nothing beside reading so much, and a cache is moved in without twice its memory.
MOST_BYTES = 1 << 30

# A recorded forward is repeated in memory of at most so many times the capacity that a call needs.
_MOST_SPARE = 4

# Slots behind a window, of the widest trees, so that buffers are seldom moved to the front.
_BEYOND_WINDOW = 512


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


@dataclass(frozen=True)
class Shape:
    """What a recorded forward depends on besides the tensors it reads.

    Attributes:
        batch: rows.
        capacity: slots of each row.
        rules: the masks'.
        dtype, device: the model's.
        positions: leading axes of its position ids.
        top_k: how many of the largest logits are brought to the host.
        vocab_size: of these, ids from here on being left out.
        taps: the boundaries whose hidden states are wanted.
        attention_by: what computes attention.
        exact: whether another capacity, by which kernels may divide their sums, does not do.
        states: hidden states of a row, [layers, width], that forwards leave to the next ones.
        window: of layers that forget what lies beyond it; None: no layer does.
        fused: whether recordings run small kernels as one, see :mod:`.fused`.
    """

    batch: int
    capacity: int
    rules: Rules
    dtype: torch.dtype
    device: torch.device
    positions: tuple[int, ...] = ()
    top_k: int = 0
    vocab_size: int = 0
    taps: tuple[HiddenLayers, ...] = ()
    attention_by: str = "mask"
    exact: bool = False
    states: tuple[int, int] = (0, 0)
    window: int | None = None
    fused: bool = False

    @property
    def near(self) -> int | None:
        """Slots of each row in the buffers of layers that forget."""
        if self.window is None:
            return None
        return min(self.capacity, capacity_bucket(self.window + _BEYOND_WINDOW))

    def serves(self, other: Shape) -> bool:
        """Whether memory of this shape does for a call that asks for the other one."""
        if self.exact:
            return self == other
        fits = self.has_room(other.batch, other.capacity)
        return fits and self == replace(other, capacity=self.capacity)

    def has_room(self, batch: int, slots: int) -> bool:
        """Whether so many rows of so many slots fit in, and do not leave too much of it empty."""
        return batch == self.batch and slots <= self.capacity <= slots * _MOST_SPARE


class Arena:
    """Where the layers of some caches write while their memory has to stay where it is.

    Args:
        shape: of the memory.

    Attributes:
        first: the slot with which the buffers of layers that forget begin.
    """

    def __init__(self, shape: Shape):
        self.shape, self.first = shape, 0
        # Numbers of buffers by kind, see `kinds_of`.
        self._members: dict[BlockShape, list[int]] = {}
        self._groups: list[torch.Tensor] = []
        # The one of each group that its present layers write to. One that grows leaves the group.
        self._blocks: list[Block] = []

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self._groups)

    def offer(self, layers: Sequence[SlotLayer]) -> None:
        """Let layers that are empty write here from the beginning, if they are as many as those
        that did so before."""
        if 2 * len(layers) != sum(map(len, self._members.values())):
            return
        self._clear()
        refs = self._block_refs()
        for i, layer in enumerate(layers):
            if not layer.forgets:
                layer.attach(refs[2 * i], refs[2 * i + 1])

    def hold(self, layers: Sequence[SlotLayer]) -> bool:
        """Take the content of the layers in and make them write here. Returns whether the tensors
        are those of the layers that wrote here before.

        Layers let go of their own memory as soon as theirs is filled here, so a new arena and a
        cache take no more than one tensor above the larger of them. An arena that held a cache
        before holds another one of the same model: its tensors are used again, emptied, since what
        was not finite in a masked slot would show.
        """
        windows = [layer.window or 0 for layer in layers if layer.forgets]
        first = layers[0].slots.longest - max(windows) + 1 if windows else 0
        members = kinds_of(layers, MOST_BYTES, lambda layer: layer.forgets, self._capacity)
        stays = members == self._members
        if not stays:
            self._members, self._groups, self._blocks = members, [], []
        refs = self._block_refs()
        begun = [x for i, x in enumerate(layers) if refs and refs[2 * i] in x.store.block_refs]
        if not begun or not all(layer in begun or layer.forgets for layer in layers):
            for layer in begun:
                layer.detach()
            self._clear()
        self.first = max(0, first)
        groups = enumerate(members.items())
        attach_in_turn(layers, ((group[1], self._block(i, *group)) for i, group in groups))
        return stays

    def _block(self, i: int, kind: BlockShape, numbers: Sequence[int]) -> Block:
        """That of a group, which is made where it is missing."""
        if i == len(self._groups):
            # Those of the inference mode could not be written to outside of it.
            with torch.inference_mode(False):
                self._groups.append(kind.zeros(len(numbers), self._capacity(kind)))
            self._blocks.append(Block(self._groups[i]))
        self._blocks[i].replace(self._groups[i], self.first if kind.apart else 0)
        return self._blocks[i]

    def _clear(self) -> None:
        """Leave nothing of earlier caches in the tensors."""
        for group in self._groups:
            group.zero_()
        self._blocks = [*map(Block, self._groups)]

    def _block_refs(self) -> dict[int, BlockRef]:
        """Buffers by their numbers, as far as they were made."""
        pairs = zip(self._members.values(), self._blocks, strict=False)
        return {n: BlockRef(block, i) for numbers, block in pairs for i, n in enumerate(numbers)}

    def _capacity(self, kind: BlockShape) -> int:
        near = self.shape.near if kind.apart else None
        return self.shape.capacity if near is None else near

    def move(self, rows: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy slots within rows: int64 [batch, 1] and [batch, moved]."""
        for block in self._blocks:
            block.move(source, destination, rows)

    def begin_with(self, first: int) -> None:
        """Let the buffers of layers that forget begin with a later slot."""
        behind, self.first = first - self.first, first
        for kind, block in zip(self._members, self._blocks, strict=True):
            if kind.apart and behind:
                block.states[..., :-behind, :] = block.states[..., behind:, :].clone()
                block.replace(block.states, first)
