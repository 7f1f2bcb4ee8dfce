"""Gated MLPs whose two first projections are one operation.

A module is one if it gives its projections what :func:`_gated_mlp` gives them, and returns the
same, whatever these make of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .fusions import Fused
from .linear import linears
from .trials import Trial, has_parts

__all__ = ["gated_mlp_of"]

_LINEARS = ("gate_proj", "up_proj", "down_proj")


def _gated_mlp(module: nn.Module, *inputs: Any, **options: Any) -> torch.Tensor | None:
    if len(inputs) != 1 or options:
        return None
    parts: dict[str, Any] = module._modules
    gate, up = linears(*inputs, parts["gate_proj"], parts["up_proj"])
    return linears(parts["act_fn"](gate) * up, parts["down_proj"])[0]


def gated_mlp_of(module: nn.Module) -> Fused | None:
    """How a module that is a gated MLP, as it is now, is computed; None of others."""
    if not has_parts(module, _LINEARS, {"act_fn"}):
        return None
    trial = Trial(module, _LINEARS)
    return _gated_mlp if trial.gives_same(_gated_mlp, ((trial.rows("gate_proj"),), {})) else None
