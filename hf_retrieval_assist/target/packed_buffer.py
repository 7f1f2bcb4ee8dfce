"""Named arrays that cross between the host and a device together, in one copy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

# Every field starts at a multiple of this many bytes, so that it can be viewed in any dtype.
_ALIGNMENT = 16

Field = tuple[torch.dtype, Sequence[int]]


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
        places, end = [], 0
        for size in sizes:
            places.append(slice(end, end + size))
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._unattended = device.type == "cuda"
        self._host = torch.zeros(end, dtype=torch.uint8, pin_memory=self._unattended)
        self._device = torch.zeros(end, dtype=torch.uint8, device=device)
        self._arrived: torch.cuda.Event | None = None
        self.host, self.device = (
            {
                name: whole[place].view(dtype).view(*shape)
                for (name, (dtype, shape)), place in zip(fields.items(), places, strict=True)
            }
            for whole in (self._host, self._device)
        )

    def send(self) -> None:
        """Copy the host's values to the device.

        They may be overwritten once something that was queued after the copy has been waited for.
        """
        self._device.copy_(self._host, non_blocking=self._unattended)

    def fetch(self) -> None:
        """Ask for the device's values; they are on the host after `wait`."""
        self._host.copy_(self._device, non_blocking=self._unattended)
        if self._unattended:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> None:
        """Wait for what was fetched last."""
        if self._arrived is not None:
            self._arrived.synchronize()
