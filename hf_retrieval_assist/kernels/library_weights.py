"""Weights that a quantisation library keeps in eight bits, read as they lie there.

torchao and optimum-quanto store a linear layer's weight as int8 values and a scale for each row,
and multiply few rows by widening all of it first. :func:`.skinny.scaled_linear` reads the same
bytes once. What a library means by its parts is not taken from its name or version: a weight is
read here if the library's own product of a probe is that of its parts, to rounding. Forms that
round the rows as well (dynamic activations) are not, and stay with their library.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..system.locks import Lock
from .skinny import are_few_rows, scaled_linear

__all__ = ["library_linear"]

plain_linear = torch._C._nn.linear

# How far apart, relative to all of a product, the library's and the kernel's may be. Rounding a row
# to eight bits moves that of the probe by about 0.05.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}

# The probe's first element, against others of about 1.
OUTLIER = 50.0

_Parts = tuple[torch.Tensor, torch.Tensor]


def _parts_of(weight: Any) -> tuple[str, str] | None:
    """The attributes that seem to hold a weight's int8 values and its rows' scales."""
    flatten = getattr(weight, "__tensor_flatten__", None)
    if flatten is None or weight.dim() != 2 or not isinstance(weight, nn.Parameter):
        return None
    parts = {name: getattr(weight, name) for name in flatten()[0]}
    values = [n for n, x in parts.items() if x.dtype == torch.int8 and x.shape == weight.shape]
    scales = [n for n, x in parts.items() if x.is_floating_point() and x.numel() == len(weight)]
    return (values[0], scales[0]) if len(values) == len(scales) == 1 else None


def _read(weight: Any, names: tuple[str, str]) -> _Parts:
    values, scales = (getattr(weight, name).detach() for name in names)
    return values, scales.reshape(-1)


def _means_its_parts(weight: Any, names: tuple[str, str]) -> bool:
    probe = torch.randn(1, weight.shape[1], generator=torch.Generator().manual_seed(0))
    probe[0, 0] = OUTLIER
    probe = probe.to(weight.dtype)
    try:
        own = scaled_linear(probe, *_read(weight, names)).float()
    except (TypeError, ValueError):  # not of a shape, dtype or device that the kernel reads
        return False
    difference = plain_linear(probe, weight).float() - own
    return bool(difference.norm() <= TOLERANCES[weight.dtype] * own.norm())


class _Known:
    """Which weights are read, by their parts' names; None: left to the library."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._names: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def names(self, weight: Any) -> tuple[str, str] | None:
        with self._lock:
            if weight not in self._names:
                with torch.no_grad():
                    names = _parts_of(weight)
                    known = names is not None and _means_its_parts(weight, names)
                self._names[weight] = names if known else None
            found: tuple[str, str] | None = self._names[weight]
            return found


_known = _Known()


def library_linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear` of a weight that is no dense tensor.

    Inside a scope of this thread few rows are multiplied by the kernel where it reads the weight,
    all others by the library that keeps it.
    """
    if are_few_rows(x, weight, bias) and (names := _known.names(weight)) is not None:
        return scaled_linear(x, *_read(weight, names), bias)
    return plain_linear(x, weight, bias)
