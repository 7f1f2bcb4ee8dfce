"""The scope in which a model's linear layers run with their weights in eight bits."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .linear import LEAST_ELEMENTS, quantized_weights, set_quantized_weights
from .quantized import QuantizedWeight, QuantizedWeights
from .reroute import is_observed, reroute

logger = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

WEIGHTS = QuantizedWeights()
"""Of all models in this process."""


class QuantizedModel:
    """A model's linear layers in eight bits, as they were when this was made.

    Args:
        weights: by the identity of the parameter that each stands for.
    """

    def __init__(self, weights: Mapping[int, QuantizedWeight]):
        self.weights = weights

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Scope in which this thread's linear layers of these weights, and no others, are computed
        with eight bits. Nothing is stored on the model, and other threads see nothing of it.

        Inside a mode that watches operators it does nothing, as `reroute`.
        """
        outer = quantized_weights()
        with reroute():
            try:
                if not is_observed():
                    set_quantized_weights(self.weights)
                yield
            finally:
                set_quantized_weights(outer)


def quantized_model(model: nn.Module) -> QuantizedModel:
    """A model with the weights of its linear layers in eight bits, packed where they are not yet.

    A weight that layers share is packed once. Layers that are no linears stay as they are, and so
    do small ones: adapters keep their precision. The log says what was packed.
    """
    started = time.perf_counter()
    known = WEIGHTS.nbytes()
    found = {id(weight): weight for weight in map(_packable, model.modules()) if weight is not None}
    packed = {key: WEIGHTS.of(weight) for key, weight in found.items()}
    if WEIGHTS.nbytes() != known:
        share = sum(weight.nbytes for weight in found.values())
        total = sum(parameter.nbytes for parameter in model.parameters())
        logger.info(
            "%s: %d linear layers in eight bits, %.0f%% of its weights, %.0f MB, %.1f s",
            *(type(model).__name__, len(found), 100 * share / max(1, total)),
            *(WEIGHTS.nbytes() / 1e6, time.perf_counter() - started),
        )
    return QuantizedModel(packed)


def _packable(layer: nn.Module) -> Any:
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
