"""How many positions a model has."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def position_limit(model: Any) -> int:
    """The most tokens that a text may have: the rows of a table of positions that was learnt.

    A model that computes its positions has no such end (`sys.maxsize`).
    """
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    limit = sys.maxsize
    for name, module in model.named_modules():
        place = name.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and ("pos" in place or place == "wpe"):
            padding = -1 if module.padding_idx is None else module.padding_idx
            if most is not None and most <= module.num_embeddings <= most + 2:
                limit = min(limit, most, module.num_embeddings - padding - 1)
    return limit
