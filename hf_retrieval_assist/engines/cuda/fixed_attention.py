"""What may compute attention over buffers of fixed capacity, and what it has to know."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch


@dataclass(frozen=True)
class Seen:
    """What the queries of one forward see, for the layers of one kind.

    Attributes:
        kept: int32 [batch], kept slots of each row, padding left out.
        first: int32 [batch], slots of padding in front of them.
        table: bool [batch, width, columns + 2], whether a query sees slot j behind the kept ones,
            in column j + 1.
        unseen: int64 [batch, width, 1], the last slot beyond a query's reach; None: all are within
            it.
        hidden: bool [batch, capacity], slots that hold no token; None: those of the padding alone.
    """

    kept: torch.Tensor
    first: torch.Tensor
    table: torch.Tensor
    unseen: torch.Tensor | None = None
    hidden: torch.Tensor | None = None

    @property
    def columns(self) -> int:
        """Slots behind the kept ones that something may lie in."""
        return self.table.shape[2] - 2


def has_triton(device: torch.device) -> bool:
    """Whether Triton's kernels run on a device: on CUDA, from the cards on that multiply bfloat16
    (compute capability 8.0)."""
    return (
        device.type == "cuda"
        and find_spec("triton") is not None
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )
