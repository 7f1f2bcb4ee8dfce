"""Named arrays that cross between the host and a device together, in one copy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

# Every field starts at a multiple of this many bytes, so that it can be viewed in any dtype.
_ALIGNMENT = 16

Field = tuple[torch.dtype, Sequence[int]]


def runs_behind(device: torch.device) -> bool:
    """Whether what the host asks of a device may be done after the host has gone on."""
    return device.type == "cuda"


class PackedBuffer:
    """One buffer on the host and one on a device, both seen as the same named tensors.

    The memory of both stays where it is, so that a captured graph may read and write it. The host's
    is pinned where the device can copy from it unattended.

    Args:
        fields: dtype and shape by name.
        device: where the other buffer is.

    Attributes:
        host, device: the tensors by name.
    """

    def __init__(self, fields: Mapping[str, Field], device: torch.device):
        sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in fields.values()]
        rooms = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        self._place = device
        behind = runs_behind(device)
        self._host = torch.zeros(sum(rooms), dtype=torch.uint8, pin_memory=behind)
        self._device = torch.zeros(sum(rooms), dtype=torch.uint8, device=device)
        self._crossed = torch.cuda.Event() if behind else None
        self.host, self.device = (
            {
                name: part.view(dtype)[: math.prod(shape)].view(tuple(shape))
                for part, (name, (dtype, shape)) in zip(parts, fields.items(), strict=True)
            }
            for parts in (self._host.split(rooms), self._device.split(rooms))
        )

    def send(self) -> None:
        """Queue a copy of the host's values to the device; they may be overwritten after `wait`."""
        self._copy(self._device, self._host)

    def fetch(self) -> None:
        """Queue a copy of the device's values to the host, where they are after `wait`."""
        self._copy(self._host, self._device)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=self._crossed is not None)
        if self._crossed is not None:
            # An event without a stream is the current device's, which need not be ours.
            self._crossed.record(torch.cuda.current_stream(self._place))

    def wait(self) -> None:
        """Wait for the last copy, after which the host may read and write its values."""
        if self._crossed is not None:
            self._crossed.synchronize()
