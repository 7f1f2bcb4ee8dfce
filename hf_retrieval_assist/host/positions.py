"""How many positions a model has."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_LENGTHS = ("position", "length", "seq_len", "context")
_SHORTEST = 8  # numbers below name no length of a text


def position_limit(model: Any) -> int:
    """The most tokens that a text may have; `sys.maxsize` where the model computes the positions.

    A table of positions is known by its name and its rows, which are as many as a length that the
    configuration names, or a few more where the first ones are set apart.
    """
    lengths = named_lengths(model.config.get_text_config(decoder=True).to_dict())
    decoder = model.get_decoder() or model
    ends = [end for name, part in decoder.named_modules() for end in _ends(name, part, lengths)]
    return min(ends, default=sys.maxsize)


def named_lengths(settings: dict[str, Any]) -> set[int]:
    """Numbers of positions that settings name, those of settings within them included."""
    found: set[int] = set()
    for name, value in settings.items():
        if isinstance(value, dict):
            found |= named_lengths(value)
        elif type(value) is int and value >= _SHORTEST and any(w in str(name) for w in _LENGTHS):
            found.add(value)
    return found


def _ends(name: str, module: nn.Module, lengths: set[int]) -> Iterator[int]:
    """How many positions each table of a module holds."""
    if isinstance(module, nn.Embedding) and _is_of_positions(name.rpartition(".")[2]):
        offset = int(getattr(module, "offset", 0))
        apart = 0 if module.padding_idx is None or offset else module.padding_idx + 1
        if module.num_embeddings - offset in lengths:
            yield module.num_embeddings - offset - apart
    for name, table in (module._buffers | vars(module)).items():
        numbers = isinstance(table, torch.Tensor) and table.is_floating_point()
        if numbers and _is_of_positions(name) and table.dim() > 1 and len(table) in lengths:
            yield len(table)


def _is_of_positions(name: str) -> bool:
    return "pos" in name or name == "wpe"
