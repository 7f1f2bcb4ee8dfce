"""A model's first layers as a model of its own, which shares all its weights."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from .feature_taps import find_blocks


def first_layers(model: Any, count: int) -> Any:
    """The first `count` blocks of a model between its embeddings and its final norm and output.

    Nothing is copied but the few modules that hold the list of blocks, and the model given stays
    as it is.

    Raises:
        ValueError: `count` is not between 1 and the model's blocks less one, or these cannot be
            found.
    """
    blocks = find_blocks(model)[1]
    if not 1 <= count < len(blocks):
        raise ValueError(
            f"layer: expected 1 to {len(blocks) - 1} for a {type(model).__name__} of "
            f"{len(blocks)} layers, got {count}"
        )
    twin = _twin(
        model, blocks, nn.ModuleList(list(blocks)[:count]), _shortened(model.config, count)
    )
    return twin.eval()


def _twin(module: Any, blocks: nn.Module, kept: nn.Module, config: Any) -> Any:
    """A module with `kept` in the place of `blocks`; one that does not hold them is shared."""
    if module is blocks:
        return kept
    if all(part is not blocks for part in module.modules()):
        return module
    twin = copy.copy(module)
    # Offloading replaces the forward of an instance by one that is bound to it.
    twin.__dict__.pop("forward", None)
    twin._modules = {}
    for name, child in module.named_children():
        twin.add_module(name, _twin(child, blocks, kept, config))
    own = getattr(module, "config", None)
    if own is not None:
        text = config.get_text_config(decoder=True)
        twin.config = text if type(own) is type(text) else config
    return twin


def _shortened(config: Any, count: int) -> Any:
    """The configuration with its number of layers and its lists of one entry per layer cut."""
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    layers = text.num_hidden_layers
    text.num_hidden_layers = count
    for name, value in text.to_dict().items():
        if isinstance(value, list) and len(value) == layers:
            setattr(text, name, value[:count])
    if shared := getattr(text, "num_kv_shared_layers", None):
        text.num_kv_shared_layers = max(0, shared - (layers - count))
    return config
