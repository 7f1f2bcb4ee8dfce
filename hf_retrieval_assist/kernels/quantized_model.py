"""The linear layers of a model with their weights in eight bits."""

from __future__ import annotations

import logging
import time

from torch import nn

from . import skinny
from .quantized import QuantizedWeight
from .weight_copies import WeightCopies, packable

logger = logging.getLogger(__name__)

WEIGHTS = WeightCopies(QuantizedWeight.pack, element_bits=8.5)
"""Of all models in this process."""


def quantized_model(model: nn.Module) -> dict[int, QuantizedWeight]:
    """The weights of a model's linear layers in eight bits, packed where they are not yet, by the
    identity of the parameter that each stands for.

    A weight that layers share is packed once. Layers that are no linears stay as they are, and so
    do small ones: adapters keep their precision. The log says what was packed.

    Raises:
        ValueError: there are no kernels for this CPU.
    """
    if not skinny.PATHS:
        raise ValueError("QuantizedSelf: expected a CPU with AVX2 or NEON, got another one")
    started = time.perf_counter()
    known = WEIGHTS.nbytes()
    found = {id(weight): weight for weight in map(packable, model.modules()) if weight is not None}
    packed = {key: WEIGHTS.of(weight).copy for key, weight in found.items()}
    if WEIGHTS.nbytes() != known:
        share = sum(weight.nbytes for weight in found.values())
        total = sum(parameter.nbytes for parameter in model.parameters())
        logger.info(
            "%s: %d linear layers in eight bits, %.0f%% of its weights, %.0f MB, %.1f s",
            *(type(model).__name__, len(found), 100 * share / max(1, total)),
            *(WEIGHTS.nbytes() / 1e6, time.perf_counter() - started),
        )
    return packed
