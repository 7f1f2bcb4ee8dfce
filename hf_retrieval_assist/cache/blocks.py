"""Where the keys and values of layers lie, where forwards write to them, and what they show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

# A block grows by half its size, so that copying it costs O(1) per token, never in small steps.
MIN_GROWTH = 256

# Tokens that windowed layers hold beyond their windows before they drop them.
SLACK = 64

Both = tuple[torch.Tensor, torch.Tensor]
"""Keys and values."""

Places = tuple[torch.Tensor, torch.Tensor]
"""Rows and slots: [batch, 1] and [batch, width], or [1, tokens] each of packed rows."""


class View(NamedTuple):
    """Where the next tokens are written, and which slots a layer then shows.

    Attributes:
        start: the slot of the first token, where all rows write to the same ones.
        places: where they do not.
        extent: up to which slot it shows. None: whole buffers, so that a forward depends on no
            number of the host; `places` are then the buffers' own.
        first: from which slot on; None: all that it holds.
    """

    start: int | None = None
    places: Places | None = None
    extent: int | None = None
    first: int | None = None


Views = tuple[View | None, View | None]
"""Those of layers without and with a window. None: rows are written to behind what a layer holds,
all of which is shown."""


class Block:
    """The keys or values of layers whose heads are alike.

    Attributes:
        states: [buffers, batch, heads, capacity, depth].
        base: the slot that stands first: windows have dropped those before it.
        opened: the start, extent and first slot of a view, and the dtype of what is written.
        new, shown: of every buffer what such a view writes to and shows, made once for all layers
            of a forward.
    """

    def __init__(self, states: torch.Tensor, base: int = 0):
        self.replace(states, base)

    @property
    def device(self) -> torch.device:
        return self.states.device

    def replace(self, states: torch.Tensor, base: int) -> None:
        """Go on in other memory."""
        self.states, self.base = states, base
        self.opened: tuple[int | None, int, int | None, torch.dtype] | None = None

    def make_room(self, extent: int, dtype: torch.dtype) -> bool:
        """Let slots up to one be written to; earlier states are promoted to what is written as by
        `torch.cat`. Returns whether they are of its dtype then."""
        if (wanted := torch.promote_types(self.states.dtype, dtype)) != self.states.dtype:
            self.replace(self.states.to(wanted), self.base)
        stale = self.states.is_inference() and not _in_inference()
        if stale or extent - self.base > self.states.shape[3]:
            self._grow(extent)
        return wanted == dtype

    def open(self, start: int | None, extent: int, first: int | None, dtype: torch.dtype) -> None:
        """Make `new` and `shown`, and room where there is none."""
        self.make_room(extent, dtype)
        states, end = self.states, extent - self.base
        new = [] if start is None else states[:, :, :, start - self.base : end].unbind(0)
        shown = states[:, :, :, 0 if first is None else first - self.base : end].unbind(0)
        self.new, self.shown, self.opened = new, shown, (start, extent, first, dtype)

    def _grow(self, extent: int) -> None:
        """Go on in new memory, since there is no room, or what was made in inference mode may not
        be written to outside of it."""
        capacity, used = self.states.shape[3], extent - self.base
        if used > capacity:
            capacity = used + max(SLACK if self.base else MIN_GROWTH, used // 2)
        shape = *self.states.shape[:3], capacity, self.states.shape[4]
        grown = self.states.new_zeros(shape)
        grown[:, :, :, : self.states.shape[3]] = self.states
        self.replace(grown, self.base)

    def drop(self, before: int, length: int) -> None:
        """Forget the slots before one, and the room that is not needed for so many in all."""
        kept = self.states[:, :, :, before - self.base : length - self.base]
        used = length - before
        if self.states.shape[3] > 2 * (used + SLACK):
            states = kept.new_zeros((*kept.shape[:3], used + SLACK, kept.shape[4]))
        else:
            states, kept = self.states, kept.clone()
        states[:, :, :, :used] = kept
        self.replace(states, before)

    def move(self, source: torch.Tensor, destination: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy slots within rows; all index tensors broadcast to [batch, moved]."""
        if self.base:
            source, destination = source - self.base, destination - self.base
        if len(rows) == 1:  # less than half the time
            self.states.index_copy_(3, destination[0], self.states.index_select(3, source[0]))
        else:
            self.states[:, rows, :, destination] = self.states[:, rows, :, source]

    def move_row(self, length: int, moved: Sequence[int]) -> None:
        """Copy to the first places behind so many slots of a single row those at `moved` places."""
        begin = length - self.base
        source = torch.tensor([begin + place for place in moved], device=self.device)
        kept = self.states.index_select(3, source)
        self.states.narrow(3, begin, len(moved)).copy_(kept)

    def zero_unused(self, lengths: Sequence[int]) -> None:
        for row, length in enumerate(lengths):
            self.states[:, row, :, max(0, length - self.base) :] = 0


def _in_inference() -> bool:
    """Whether tensors of the inference mode may be written to. Compilers cannot ask."""
    return torch.compiler.is_compiling() or torch.is_inference_mode_enabled()


class BlockRef(NamedTuple):
    """A buffer of a block."""

    block: Block
    buffer: int

    def held(self, length: int) -> torch.Tensor:
        """[batch, heads, slots, depth]: its slots up to a length."""
        return self.block.states[self.buffer, :, :, : length - self.block.base]


@dataclass(eq=False)
class OwnTensors:
    """A layer's keys and values in tensors of its own, as transformers' layers hold theirs.

    Attributes:
        keys, values: [batch, heads, slots, depth]; None, or without axes, where there are none.
        dropped: slots before those that it holds.
    """

    keys: Any = None
    values: Any = None
    dropped: int = 0
    block_refs = ()

    @property
    def is_empty(self) -> bool:
        """An interrupt may leave a layer initialised without states."""
        return self.keys is None or self.keys.ndim != 4

    @property
    def length(self) -> int:
        return 0 if self.is_empty else self.dropped + int(self.keys.shape[2])

    @length.setter
    def length(self, length: int) -> None:
        if self.length > length:
            held = length - self.dropped
            self.keys, self.values = self.keys[:, :, :held], self.values[:, :, :held]

    def put(self, view: View | None, window: int | None, *new: torch.Tensor) -> Both:
        """Write keys and values `[batch, heads, n, depth]`, and return what is shown of both.

        Args:
            view: None: all rows are written to behind what is held, all of which is shown.
            window: of a layer that drops what it has passed.
        """
        keys, values = new
        if not self.is_empty:
            keys, values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        elif view is not None and view.places is not None:
            # The first tokens may lie in another order than they were fed in.
            rows, slots = view.places
            keys, values = (states.clone() for states in new)
            for ordered, states in zip((keys, values), new, strict=True):
                ordered[rows, :, slots] = states.transpose(1, 2)
        self.keys, self.values = keys, values
        if window is not None and (passed := keys.shape[2] - window + 1) > SLACK:
            self.keys, self.values = keys[:, :, passed:].clone(), values[:, :, passed:].clone()
            self.dropped += passed
        return keys, values


@dataclass(eq=False)
class InBlocks:
    """A layer's keys and values in blocks.

    Attributes:
        block_refs: of keys and of values.
        length: slots in use, those that were dropped included.
    """

    block_refs: tuple[BlockRef, BlockRef]
    length: int
    is_empty = False

    @property
    def keys(self) -> torch.Tensor:
        return self.block_refs[0].held(self.length)

    @property
    def values(self) -> torch.Tensor:
        return self.block_refs[1].held(self.length)

    @property
    def dropped(self) -> int:
        return self.block_refs[0].block.base

    def put(self, view: View | None, window: int | None, *new: torch.Tensor) -> Both:
        """See :meth:`OwnTensors.put`; whoever keeps tokens drops what windows have passed."""
        (keys, k), (values, v) = self.block_refs
        view = view or View(self.length, extent=self.length + new[0].shape[2])
        if view.extent is None:
            self._write(view, *new)
            return keys.states[k], values.states[v]
        for block, states in zip((keys, values), new, strict=True):
            opened = view.start, view.extent, view.first, states.dtype
            if opened != block.opened or (block.states.is_inference() and not _in_inference()):
                block.open(*opened)
        if view.places is None:
            keys.new[k].copy_(new[0])
            values.new[v].copy_(new[1])
        else:
            self._write(view, *new)
        self.length = view.extent
        return keys.shown[k], values.shown[v]

    def _write(self, view: View, *new: torch.Tensor) -> None:
        assert view.places is not None
        for (block, buffer), states in zip(self.block_refs, new, strict=True):
            rows, slots = (indices.to(states.device) for indices in view.places)
            if block.base and view.extent is not None:
                slots = slots - block.base
            block.states[buffer][rows, :, slots] = states.transpose(1, 2).to(block.states.dtype)


class BlockShape(NamedTuple):
    """What buffers have in common that share a block.

    `apart` tells layers that show or hold other slots, None or False: all; `part` blocks of a kind.
    """

    batch: int
    heads: int
    depth: int
    dtype: torch.dtype
    device: torch.device
    apart: int | None
    part: int

    def zeros(self, buffers: int, slots: int) -> torch.Tensor:
        """[buffers, batch, heads, slots, depth]"""
        shape = buffers, self.batch, self.heads, slots, self.depth
        return torch.zeros(shape, dtype=self.dtype, device=self.device)
