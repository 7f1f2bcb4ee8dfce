"""What tensors hold and where it lies, and who records what a thread computes with them."""

from __future__ import annotations

import threading
from typing import Any

import torch


class _Thread(threading.local):
    """What the running thread has of its own.

    Attributes:
        recorder: what records its forward, whom layers of caches ask; None: nothing does, or it
            looks away.
    """

    recorder: Any = None


thread = _Thread()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits, those of NaN and the signs of zeros among them."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    first, second = (x.contiguous().view(-1).view(torch.uint8) for x in (one, other))
    return torch.equal(first, second)


def memory_of(tensor: torch.Tensor) -> int:
    """The address of what a tensor is a view of; 0 where it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except Exception:  # its kind's own, as sparse ones raise and those that are not there yet
        return 0
