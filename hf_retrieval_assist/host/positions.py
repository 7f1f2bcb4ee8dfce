"""How many positions a model has."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

_LENGTHS = ("position", "length", "seq_len", "context")
_SHORTEST = 8  # numbers below name no length of a text


def position_limit(model: Any) -> int:
    """The most tokens that a text may have; `sys.maxsize` where the model computes the positions.

    A table of positions is known by its name and its rows, which are as many as a length that the
    configuration names, or a few more where the first ones are set apart.
    """
    lengths = named_lengths(model.config.get_text_config(decoder=True))
    decoder = model.get_decoder() or model
    ends = [end for name, part in decoder.named_modules() for end in _ends(name, part, lengths)]
    return min(ends, default=sys.maxsize)


def named_lengths(config: PreTrainedConfig) -> set[int]:
    """Numbers of positions that a configuration names, those of settings within it included."""
    found, tables = set[int](), {id(config): vars(config)}
    waiting = [*tables.values()]
    for table in waiting:  # which become more
        for name, value in dict.items(table):
            kind = type(value)
            if issubclass(kind, (dict, PreTrainedConfig)):
                if id(value) not in tables:
                    tables[id(value)] = value if issubclass(kind, dict) else vars(value)
                    waiting.append(tables[id(value)])
            elif kind is int and value >= _SHORTEST and any(w in str(name) for w in _LENGTHS):
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
        numbers = issubclass(type(table), torch.Tensor) and table.is_floating_point()
        if numbers and _is_of_positions(name) and table.dim() > 1 and len(table) in lengths:
            yield len(table)


def _is_of_positions(name: str) -> bool:
    return "pos" in name or name == "wpe"
