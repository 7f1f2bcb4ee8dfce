"""Smaller copies of models' weights, which the kernels read in the place of these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..system.locks import Lock
from . import skinny
from .linear import LEAST_ELEMENTS

__all__ = ["WeightCopies", "packable"]

# So many elements, evenly spread over a weight, tell whether it has been written to unnoticed.
SAMPLED = 256

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Copy(Protocol):
    @property
    def nbytes(self) -> int: ...


C = TypeVar("C", bound=_Copy)

# Where a weight lies and how often it was written to; what a sample of its values adds up to.
_State = tuple[int, torch.Size, tuple[int, ...], torch.dtype, int, int]


def _sample_of(weight: torch.Tensor) -> int:
    """The sum of a sample's bits. Writing through `.data` leaves no other trace."""
    flat = weight.detach().reshape(-1)
    bits = torch.int32 if weight.element_size() == 4 else torch.int16
    return int(flat[:: max(1, len(flat) // SAMPLED)].view(bits).sum())


def _state_of(weight: torch.Tensor) -> _State:
    version = 0 if weight.is_inference() else weight._version
    return (
        *(weight.data_ptr(), weight.shape, weight.stride(), weight.dtype),
        *(version, _sample_of(weight)),
    )


class WeightCopies(Generic[C]):
    """Copies of models' weights: each packed once, shared by all, and freed with its model.

    A weight that was written to, moved or replaced is packed anew when it is next asked for. (Of
    writes through `.data`, which PyTorch does not count, those are seen that reach one of `SAMPLED`
    evenly spread elements.) Parameters that share memory share the packed copy. Safe to use from
    several threads.

    Args:
        pack: makes a weight's copy.
    """

    def __init__(self, pack: Callable[[torch.Tensor], C]) -> None:
        self._pack = pack
        self._lock = Lock()
        self._of_tensor: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._uses: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._of_state: WeakValueDictionary[_State, C] = WeakValueDictionary()

    def of(self, weight: torch.Tensor) -> C:
        """The weight's copy; raises what packing raises."""
        with self._lock:
            state = _state_of(weight)
            known: tuple[_State, C] | None = self._of_tensor.get(weight)
            if known is not None and known[0] == state:
                return known[1]
            packed = self._of_state.get(state)
            if packed is None:
                self._of_tensor.pop(weight, None)  # its old copy makes room first
                self._uses.pop(weight, None)
                packed = self._of_state[state] = self._pack(weight)
            self._of_tensor[weight] = (state, packed)
            return packed

    def knows(self, weight: torch.Tensor) -> bool:
        """Whether the weight, as it is now, was packed already."""
        with self._lock:
            return _state_of(weight) in self._of_state

    def count_use(self, weight: torch.Tensor) -> int:
        """Count a time when a weight's copy would have been of use; how many there were."""
        with self._lock:
            uses: int = self._uses.get(weight, 0) + 1
            self._uses[weight] = uses
            return uses

    def nbytes(self) -> int:
        """The memory that all copies take, in bytes."""
        with self._lock:
            return sum(packed.nbytes for packed in self._of_state.values())


def packable(layer: nn.Module) -> Any:
    """The weight of a linear layer that is worth packing; None otherwise."""
    if not skinny.PATHS or not isinstance(layer, nn.Linear):
        return None
    # Not by attribute: a parametrised layer would compute it.
    weight = dict(layer.named_parameters(recurse=False)).get("weight")
    if (
        type(weight) is not nn.Parameter
        or weight.device.type != "cpu"
        or weight.layout != torch.strided
        or weight.dtype not in _DTYPES
        or weight.stride(-1) != 1
        or weight.numel() < LEAST_ELEMENTS
    ):
        return None
    return weight
