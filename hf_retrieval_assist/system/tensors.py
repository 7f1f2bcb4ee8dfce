"""What tensors hold and where they lie, compared without regard to their values' meaning."""

from __future__ import annotations

import torch


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
    except (
        Exception
    ):  # whatever its kind raises, as sparse ones do and those that are not there yet
        return 0
