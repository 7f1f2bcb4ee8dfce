"""The linear layers of a model with their weights in eight bits."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from torch import nn

from .linear import LEAST_ELEMENTS
from .quantized import QuantizedWeight, QuantizedWeights

logger = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

WEIGHTS = QuantizedWeights()
"""Of all models in this process."""


def quantized_model(model: nn.Module) -> dict[int, QuantizedWeight]:
    """The weights of a model's linear layers in eight bits, packed where they are not yet, by the
    identity of the parameter that each stands for.

    A weight that layers share is packed once. Layers that are no linears stay as they are, and so
    do small ones: adapters keep their precision. The log says what was packed.
    """
    started = time.perf_counter()
    known = WEIGHTS.nbytes()
    found = {id(weight): weight for weight in map(packable, model.modules()) if weight is not None}
    packed = {key: WEIGHTS.of(weight) for key, weight in found.items()}
    if WEIGHTS.nbytes() != known:
        share = sum(weight.nbytes for weight in found.values())
        total = sum(parameter.nbytes for parameter in model.parameters())
        logger.info(
            "%s: %d linear layers in eight bits, %.0f%% of its weights, %.0f MB, %.1f s",
            *(type(model).__name__, len(found), 100 * share / max(1, total)),
            *(WEIGHTS.nbytes() / 1e6, time.perf_counter() - started),
        )
    return packed


def packable(layer: nn.Module) -> Any:
    """The weight of a linear layer that is worth packing; None otherwise."""
    # Not by attribute: a parametrised layer would compute it.
    weight = dict(layer.named_parameters(recurse=False)).get("weight")
    weight = weight if isinstance(layer, nn.Linear) else None
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
