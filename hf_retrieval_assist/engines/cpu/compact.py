"""Float32 weights whose values are all bfloat16's, read as bfloat16: half of the bytes.

Most checkpoints are bfloat16. Loaded in float32, half of each weight is zeros, and a forward of few
rows is a read of the weights. The kernels widen what they read to float32 and multiply as always,
so that products have the bits that the weights in memory give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...structures.modules import modules_of
from ...system.lazy import cached_property
from .skinny import Matrix, dense
from .weight_copies import Kept, WeightCopies, packable

# More rows spend more on widening than they save on reading.
MOST_ROWS = 8

_SINGLE = torch.float32

# Elements that are copied and compared at a time, within the caches.
PART = 1 << 18


@dataclass(frozen=True, eq=False)
class CompactWeight:
    """A float32 matrix in bfloat16.

    Attributes:
        values: bfloat16 [outputs, depth]; None where the matrix has other values.
    """

    values: torch.Tensor | None

    @classmethod
    def pack(cls, weight: torch.Tensor) -> CompactWeight:
        """A matrix as bfloat16, if that loses nothing."""
        weight = weight.detach()
        values = torch.empty_like(weight, dtype=torch.bfloat16)
        rows = max(1, PART // weight.shape[1])
        for part, copy in zip(weight.split(rows), values.split(rows), strict=True):
            if not torch.equal(copy.copy_(part).float(), part):
                return cls(None)
        return cls(values)

    @cached_property
    def matrix(self) -> Matrix:
        """What products read."""
        return dense(self.values)

    @property
    def nbytes(self) -> int:
        """The memory it takes, in bytes."""
        return 0 if self.values is None else self.values.nbytes


COMPACT = WeightCopies(CompactWeight.pack, lambda weight: 2 * weight.numel())
"""Copies for all models in this process."""


def compactable(model: nn.Module) -> list[torch.Tensor]:
    """The weights of a model's linear layers that may have a copy: float32, and the greatest has
    bfloat16's values as far as its first row tells."""
    layers = [module for module in modules_of(model) if isinstance(module, nn.Linear)]
    single = (x for x in layers if getattr(x._parameters.get("weight"), "dtype", None) is _SINGLE)
    found = {id(weight): weight for weight in map(packable, single) if weight is not None}
    weights = [*found.values()]
    greatest = max(weights, key=torch.Tensor.numel, default=None)
    if greatest is None or CompactWeight.pack(greatest[:1]).values is None:
        return []
    return weights


@dataclass(frozen=True, eq=False)
class CompactModel:
    """The copies of a model's weights, which products read in their place; see `PackedModel`.

    Args:
        weights: the model's.
        kept: the copy of each.
    """

    weights: Sequence[torch.Tensor]
    kept: Sequence[Kept[CompactWeight]]

    @cached_property
    def by_id(self) -> dict[int, CompactWeight]:
        pairs = zip(self.weights, self.kept, strict=True)
        return {id(x): kept.copy for x, kept in pairs if kept.copy.values is not None}

    def stand(self) -> bool:
        """Whether all weights are what was packed."""
        pairs = zip(self.weights, self.kept, strict=True)
        return all(kept.stands_for(weight) for weight, kept in pairs)
