"""Weights that a quantisation library keeps in eight bits, read as they lie there.

torchao and optimum-quanto store a linear layer's weight as int8 values and a scale for each row,
and multiply few rows by widening all of it first. :func:`.skinny.routed_scaled` reads the same
bytes once. What a library means by its parts is not taken from its name or version: a weight is
read here if the library's own product of a probe is that of its parts, to rounding. Forms that
round the rows as well (dynamic activations) are not, and stay with their library.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ...system.locks import Lock
from .skinny import in_route, routed_scaled

plain_linear = torch._C._nn.linear

# How far apart, relative to all of a product, the library's and the kernel's may be. Rounding a row
# to eight bits moves that of the probe by about 0.05.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}

# The probe's first element, against others of about 1.
OUTLIER = 50.0

_UNKNOWN: Any = object()


class Parts(NamedTuple):
    """Where a weight keeps what the kernel reads.

    Attributes:
        values, scales: the attributes that hold its int8 values and its rows' scales.
        dtype: of what it multiplies.
    """

    values: str
    scales: str
    dtype: torch.dtype

    @classmethod
    def of(cls, weight: Any) -> Parts | None:
        """What seem to be a weight's; None where it keeps no such things."""
        flatten = getattr(weight, "__tensor_flatten__", None)
        if flatten is None or weight.dim() != 2 or not isinstance(weight, nn.Parameter):
            return None
        held = {name: getattr(weight, name) for name in flatten()[0]}
        values = [n for n, x in held.items() if x.dtype == torch.int8 and x.shape == weight.shape]
        scales = [n for n, x in held.items() if x.is_floating_point() and x.numel() == len(weight)]
        if len(values) != 1 or len(scales) != 1:
            return None
        return cls(values[0], scales[0], weight.dtype)

    def product(
        self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The kernel's product; None of what it does not take."""
        values, scales = getattr(weight, self.values), getattr(weight, self.scales)
        return routed_scaled(x, values, scales, self.dtype, bias)

    def are_all_of(self, weight: Any) -> bool | None:
        """Whether the library's product is that of the parts; None where the kernel takes none."""
        probe = torch.randn(1, weight.shape[1], generator=torch.Generator().manual_seed(0))
        probe[0, 0] = OUTLIER
        probe = probe.to(self.dtype)
        own = self.product(probe, weight, None)
        if own is None:
            return None
        difference = plain_linear(probe, weight).float() - own.float()
        return bool(difference.norm() <= TOLERANCES[self.dtype] * own.float().norm())


_lock = Lock()
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The parts of each weight that is read; of others None."""


def _parts_of(weight: Any) -> Parts | None:
    found: Parts | None = _known.get(weight, _UNKNOWN)
    if found is not _UNKNOWN:
        return found
    with _lock, torch.no_grad():
        parts = Parts.of(weight)
        read = False if parts is None else parts.are_all_of(weight)
        if read is None:  # autocast is on, say
            return None
        _known[weight] = found = parts if read else None
        return found


def library_linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear` of a weight that is no dense tensor.

    Inside a scope of this thread few rows are multiplied by the kernel where it reads the weight,
    all others by the library that keeps it.
    """
    parts = _parts_of(weight) if in_route() and isinstance(weight, torch.Tensor) else None
    product = None if parts is None else parts.product(x, weight, bias)
    return plain_linear(x, weight, bias) if product is None else product
