"""Memory for keys and values that several layers of a cache share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

# A block grows by half its size, so that copying it costs O(1) per token, never in small steps.
MIN_GROWTH = 256

# Tokens that windowed layers hold beyond their windows before they drop them.
SLACK = 64


class Block:
    """The keys or values of layers whose heads are alike.

    Attributes:
        states: [buffers, batch, heads, capacity, depth].
        base: the slot that stands first: windows have dropped those before it.
    """

    def __init__(self, states: torch.Tensor, base: int = 0):
        self.states = states
        self.base = base
        self._made: Any = None
        self._new: Sequence[torch.Tensor] = ()
        self._shown: Sequence[torch.Tensor] = ()

    def put(self, states: torch.Tensor, base: int) -> None:
        """Go on in other memory."""
        self.states, self.base, self._made = states, base, None

    def views(
        self, start: int, extent: int, first: int | None, dtype: torch.dtype
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Of every buffer the slots from `start` and those from `first` on, up to `extent`; made
        once for all layers of a forward, and room for them where there is none.

        Args:
            dtype: of what is to be written, to which earlier states are promoted as by `torch.cat`.
        """
        made = start, extent, first, dtype
        if made != self._made or (self.states.is_inference() and not _in_inference()):
            if (wanted := torch.promote_types(self.states.dtype, dtype)) != self.states.dtype:
                self.states = self.states.to(wanted)
            self._reserve(extent)
            first = self.base if first is None else first
            base, states = self.base, self.states
            self._new = states[:, :, :, start - base : extent - base].unbind(0)
            self._shown = states[:, :, :, first - base : extent - base].unbind(0)
            self._made = made
        return self._new, self._shown

    def _reserve(self, extent: int) -> None:
        capacity, used = self.states.shape[3], extent - self.base
        # What was made in inference mode may not be written to outside of it.
        if used > capacity:
            capacity = used + max(SLACK if self.base else MIN_GROWTH, used // 2)
        elif not self.states.is_inference() or _in_inference():
            return
        shape = *self.states.shape[:3], capacity, self.states.shape[4]
        grown = self.states.new_zeros(shape)
        grown[:, :, :, : self.states.shape[3]] = self.states
        self.put(grown, self.base)

    def drop(self, before: int, length: int) -> None:
        """Forget the slots before one, and the room that is not needed for so many in all."""
        kept = self.states[:, :, :, before - self.base : length - self.base]
        used = length - before
        if self.states.shape[3] > 2 * (used + SLACK):
            states = kept.new_zeros((*kept.shape[:3], used + SLACK, kept.shape[4]))
        else:
            states, kept = self.states, kept.clone()
        states[:, :, :, :used] = kept
        self.put(states, before)

    def move(self, source: torch.Tensor, destination: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy slots within rows; all index tensors broadcast to [batch, moved]."""
        if self.base:
            source, destination = source - self.base, destination - self.base
        if len(rows) == 1:  # less than half the time
            self.states.index_copy_(3, destination[0], self.states.index_select(3, source[0]))
        else:
            self.states[:, rows, :, destination] = self.states[:, rows, :, source]

    def wipe(self, lengths: Sequence[int]) -> None:
        for row, length in enumerate(lengths):
            self.states[:, row, :, max(0, length - self.base) :] = 0


def _in_inference() -> bool:
    """Whether tensors of the inference mode may be written to. Compilers cannot ask."""
    return torch.compiler.is_compiling() or torch.is_inference_mode_enabled()


Home = tuple[Block, int]
"""A block, and the number of a buffer in it."""


class Kind(NamedTuple):
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
