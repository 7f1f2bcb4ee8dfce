"""Smaller copies of models' weights, which the kernels read in the place of these."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ...system import changes
from ...system.locks import Lock
from . import skinny

# Smaller weights stay in the second-level cache between two forwards.
LEAST_ELEMENTS = 1 << 17

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Copy(Protocol):
    @property
    def nbytes(self) -> int: ...


C = TypeVar("C", bound=_Copy)

# Where a weight lies, how its memory is read, and how often a write to it was counted or told.
Mark: TypeAlias = tuple[int, torch.Size, tuple[int, ...], torch.dtype, int, int]


def mark_of(weight: torch.Tensor) -> Mark:
    version = 0 if weight.is_inference() else weight._version
    place = weight.data_ptr(), weight.shape, weight.stride(), weight.dtype
    return *place, version, changes.said()


def _sample_of(weight: torch.Tensor) -> int:
    """A hash of elements, among which are one of each row and one of each column at least."""
    rows, columns = weight.shape
    step = min(weight.numel() // max(rows, columns, 1), columns - 1) or 1
    while math.gcd(step, columns) > 1:  # or it would come back to the same columns
        step -= 1
    elements = weight.detach().view(-1)[::step]
    bits = torch.int32 if weight.element_size() == 4 else torch.int16
    return hash(elements.view(bits).contiguous().numpy().tobytes())


@dataclass(eq=False)
class Kept(Generic[C]):
    """A copy, and what its weight was like when it was packed."""

    copy: C
    mark: Mark
    sample: int

    def stands_for(self, weight: torch.Tensor) -> bool:
        """Whether the weight is what was packed, as far as PyTorch counts."""
        return self.mark == mark_of(weight)


class WeightCopies(Generic[C]):
    """Copies of models' weights: each packed once, shared by all, and freed with its model.

    A copy is read as long as it stands for its weight. A write is noticed

    * at the next product, where PyTorch counts it (operators in place, optimisers, `copy_`), or
      where the weight was replaced, moved or resized;
    * where PyTorch does not count it (through `.data` or NumPy; of inference tensors), when a call
      begins, if it reaches all of a row or of a column. A few elements that were written so may not
      show: `release_memory` drops a model's copies.

    Looking reads a cache line of each row, once a call: of weights with 640 columns in float32
    that took an eighth of the time of their product. Parameters that share memory share a copy.
    Safe to use from several threads.

    Args:
        pack: makes a weight's copy, of it and of what else `of` was given.
        size_of: the bytes that it will take.
    """

    def __init__(self, pack: Callable[..., C], size_of: Callable[[torch.Tensor], int]) -> None:
        self._pack, self.size_of = pack, size_of
        self._lock = Lock()
        self._of_tensor: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._of_mark: WeakValueDictionary[Mark, Kept[C]] = WeakValueDictionary()
        self._uses: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def find(self, weight: torch.Tensor) -> Kept[C] | None:
        """The copy that stands for a weight, if there is one."""
        with self._lock:
            kept = self._of_mark.get(mark_of(weight))
            if kept is not None:
                if kept.sample == _sample_of(weight):
                    self._of_tensor[weight] = kept
                    return kept
                del self._of_mark[kept.mark]
            self._of_tensor.pop(weight, None)
            return None

    def of(self, weight: torch.Tensor, *given: Any) -> Kept[C]:
        """The copy that stands for a weight, made if need be, of what is given besides; raises what
        packing raises."""
        with self._lock:
            kept = self.find(weight)
            if kept is None:
                self._uses.pop(weight, None)
                mark, sample = mark_of(weight), _sample_of(weight)
                kept = self._of_tensor[weight] = Kept(self._pack(weight, *given), mark, sample)
                self._of_mark[mark] = kept
            return kept

    def release(self, weight: torch.Tensor) -> None:
        """Drop a weight's copy, and the uses that were counted."""
        with self._lock:
            self._of_tensor.pop(weight, None)
            self._uses.pop(weight, None)

    def count_use(self, weight: torch.Tensor) -> int:
        """Count a time when a copy would have been of use; how many there were since the last one
        was packed."""
        with self._lock:
            uses: int = self._uses.get(weight, 0) + 1
            self._uses[weight] = uses
            return uses

    def nbytes(self) -> int:
        """The memory that all copies take, in bytes."""
        with self._lock:
            return sum(kept.copy.nbytes for kept in self._of_mark.values())


def output_weight(model: Any) -> Any:
    """That of a model's output layer; None where it is not worth packing."""
    layer = model.get_output_embeddings()
    return None if layer is None else packable(layer)


def packable(layer: nn.Module, least: int | None = None) -> Any:
    """The weight of a linear layer that is worth packing; None otherwise.

    Args:
        least: elements of such a weight; None: as many as a forward has to fetch from memory.
    """
    if not skinny.PATHS or not isinstance(layer, nn.Linear):
        return None
    # Not by attribute: a parametrised layer would compute it.
    weight = layer._parameters.get("weight")
    if (
        type(weight) is not nn.Parameter
        or weight.device.type != "cpu"
        or weight.layout != torch.strided
        or weight.dtype not in _DTYPES
        or not weight.is_contiguous()
        or weight.numel() < (LEAST_ELEMENTS if least is None else least)
    ):
        return None
    return weight
