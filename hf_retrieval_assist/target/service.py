"""Which tier serves a model: decided by its properties and one small test, never by its name."""

from __future__ import annotations

import logging
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from ..kernels.attention_scope import is_exchangeable
from ..kernels.split_attention import can_split
from ..system.locks import Lock
from .fixed_verifier import stays_in_place
from .host import (
    attention_of,
    input_device,
    is_compiled,
    is_pipeline,
    is_stateful,
    keeps_no_activations,
    takes_dynamic_cache,
    why_no_mask,
    why_plain_in_pipeline,
)
from .kv_cache import SLOT_LAYERS
from .self_test import SHORTAGES, fault, forward_parameters, has_padding
from .tiers import Service, Tier
from .tree_attention import layer_masks, single_mask

logger = logging.getLogger(__name__)

# Inputs that a prompt's tokens bring, of which steps know what becomes of them.
_OF_TOKENS = frozenset(
    (
        *("attention_mask", "position_ids", "cache_position", "inputs_embeds", "logits_to_keep"),
        *("token_type_ids", "mm_token_type_ids"),
    )
)

_services: weakref.WeakKeyDictionary[Any, dict[Any, Service]] = weakref.WeakKeyDictionary()
_lock = Lock()


def choose_service(model: Any, model_kwargs: dict[str, Any], batch_size: int = 1) -> Service:
    """The best tier the model is right at.

    Found once per model, attention implementation and dtype, and once more for batches and padding.
    Where memory is too short to find it, the call is decoded plainly and the next one asks again.

    Args:
        model: a transformers model.
        model_kwargs: inputs of its forward, as `generate` prepared them.
        batch_size: rows, of which no mask tells where nothing is padded.
    """
    if model.training and (why := _why_plain_in_training(model)) is not None:
        return Service(Tier.PLAIN, why)
    padded, piped = has_padding(model_kwargs), is_pipeline(model)
    if padded and piped:
        return Service(Tier.PLAIN, "later stages of a pipeline see no padding")
    packs = batch_size > 1 and _packs(model, model_kwargs)
    several = padded or (batch_size > 1 and not piped)
    key = (attention_of(model.config), model.dtype, several, packs)
    with _lock:
        known = _services.setdefault(model, {})
        if key not in known:
            try:
                known[key] = _first_right(model, model_kwargs, several, packs)
            except SHORTAGES as shortage:
                why = f"no memory to test how its drafts are verified: {shortage!r}"
                logger.warning("%s: plain for this call (%s)", type(model).__name__, why)
                return Service(Tier.PLAIN, why)
            logger.info(
                "%s: %s (%s)", type(model).__name__, known[key].tier.value, known[key].reason
            )
        return known[key]


def _why_plain_in_training(model: Any) -> str | None:
    """What of a model in train mode no other way of decoding would repeat; None: nothing.

    Dropout takes random numbers in every forward, so fewer forwards take others.
    """
    rates = [
        rate
        for name, rate in model.config.get_text_config(decoder=True).to_dict().items()
        if any(part in name for part in ("drop", "jitter")) and isinstance(rate, float)
    ]
    rates += [layer.p for layer in model.modules() if isinstance(layer, nn.Dropout)]
    if any(rates):
        return "the model is in train mode and drops out"
    if keeps_no_activations(model):
        return "gradient checkpointing keeps no cache"
    return None


def _first_right(model: Any, model_kwargs: dict[str, Any], several: bool, packs: bool) -> Service:
    reason = ""
    for service in _candidates(model, packs):
        if service.tier is Tier.PLAIN:
            return Service(Tier.PLAIN, "; ".join(filter(None, (service.reason, reason))))
        wrong = fault(model, service, model_kwargs, several)
        if wrong is None:
            return replace(service, reason=reason or service.reason)
        reason = f"{service.tier.value} failed its test: {wrong}"
    raise AssertionError("the last candidate is the plain tier")


def _candidates(model: Any, packs: bool) -> list[Service]:
    """Tiers that the model's properties allow, best first; the last one is plain."""
    plain = Service(Tier.PLAIN, "")
    if (why := why_plain_in_pipeline(model)) is not None:
        return [Service(Tier.PLAIN, why)]
    parameters = forward_parameters(model)
    name = next((n for n in ("past_key_values", "cache_params") if n in parameters), None)
    if name is None:
        return [Service(Tier.PLAIN, "its forward takes no cache")]
    if not takes_dynamic_cache(model):
        return [Service(Tier.PLAIN, "it does not take a DynamicCache")]
    config = model.config.get_text_config(decoder=True)
    layers = DynamicCache(config=config).layers
    stateful = is_stateful(model)
    if stateful or any(type(layer) not in SLOT_LAYERS for layer in layers):
        replay = Service(Tier.REPLAY, "it has a recurrent state", cache_name=name)
        convolution = Service(Tier.CHAIN, "it has a convolution state", cache_name=name)
        return [replay, plain] if stateful else [convolution, replay, plain]
    if (why := _why_no_tree(model, config, parameters)) is not None:
        return [Service(Tier.CHAIN, why), plain]
    trees = [Service(Tier.TREE, "one mask", single_mask(config))]
    if layer_masks(config):
        trees.insert(0, Service(Tier.TREE, "a mask per layer type", layer_masks(config)))
    parts = [replace(service, split=True) for service in trees] if _splits(model) else []
    if (why := why_no_mask(model.config)) is not None:
        return [*parts, Service(Tier.CHAIN, why), plain]
    if packs:
        trees = [*(replace(service, packed=True) for service in trees), *trees]
    return [*parts, *trees, Service(Tier.CHAIN, ""), plain]


def _splits(model: Any) -> bool:
    """Whether attention may be computed in parts where a model computes."""
    device = input_device(model)
    known = is_exchangeable(attention_of(model.config))
    return stays_in_place(device) and known and can_split(device)


def _packs(model: Any, model_kwargs: dict[str, Any]) -> bool:
    """Whether the rows of a batch may be fed behind one another: where no memory stays in place,
    no graph was compiled that every step would change, nothing comes with the rows whose meaning is
    not known, and every layer is here."""
    foreign = any(
        isinstance(value, torch.Tensor)
        for name, value in model_kwargs.items()
        if name not in _OF_TOKENS
    )
    known = is_exchangeable(attention_of(model.config)) and not is_compiled(model)
    alone = not stays_in_place(input_device(model)) and not is_pipeline(model)
    return known and not foreign and alone


def _why_no_tree(model: Any, config: Any, parameters: Any) -> str | None:
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if "position_ids" not in parameters:
        return "its forward takes no position_ids"
    if getattr(config, "alibi", False):
        return "alibi counts distances in cache slots"
    return None
