"""How many positions a model has learnt or tabulated."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# Rows that tables have in front of their first position.
_MOST_BEFORE = 2


def table_end(model: Any) -> int | None:
    """The first position that a model has no entry for; None: it computes what it needs.

    A table is found by its size: a matrix of embeddings other than the tokens', or a tensor that
    is no parameter, with a row for each of as many positions as the configuration names.
    """
    config = model.config.get_text_config(decoder=True).to_dict()
    named = [value for name, value in config.items() if _counts_positions(name, value)]
    tokens = model.get_input_embeddings()
    sizes = [
        module.num_embeddings
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module is not tokens
    ]
    sizes += [len(table) for module in model.modules() for table in _tables(module)]
    ends = [n for n in named for size in sizes if n <= size <= n + _MOST_BEFORE]
    return min(ends, default=None)


def _counts_positions(name: str, value: Any) -> bool:
    words = ("position", "n_ctx", "seq_len", "context_length", "target_positions")
    return type(value) is int and any(word in name for word in words)


def _tables(module: nn.Module) -> list[torch.Tensor]:
    held = [*module._buffers.values(), *vars(module).values()]
    found = [value for value in held if isinstance(value, torch.Tensor) and value.dim() > 1]
    return [table for table in found if table.is_floating_point()]
