"""The ways in which drafts are verified, and what each of them needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache

from .host import input_device
from .kv_cache import SlotCache
from .tree_attention import LayerMask, TreeAttention
from .verifiers import (
    ChainVerifier,
    ConvolutionVerifier,
    ReplayVerifier,
    TreeVerifier,
    Verifier,
)


class Tier(str, Enum):
    """How drafts are verified, best first."""

    TREE = "tree"
    CHAIN = "chain"
    REPLAY = "replay"
    PLAIN = "plain"


@dataclass(frozen=True)
class Service:
    """How a model is served.

    Attributes:
        tier: see :class:`Tier`.
        reason: in words, for the log.
        rules: mask rules of the tree tier, per layer type or one for all.
        cache_name: the forward's keyword for the cache.
    """

    tier: Tier
    reason: str
    rules: dict[str, LayerMask] | LayerMask = field(default_factory=LayerMask)
    cache_name: str = "past_key_values"

    def verifier(
        self, model: Any, cache: SlotCache, model_kwargs: dict[str, Any], prompt_ids: torch.Tensor
    ) -> Verifier:
        """The verifier of this tier, for one call whose prefill is done."""
        if self.tier is Tier.REPLAY:
            return ReplayVerifier(model, cache, model_kwargs, prompt_ids)
        if self.tier is Tier.CHAIN:
            chain = ConvolutionVerifier if cache.state_layers else ChainVerifier
            return chain(model, cache, model_kwargs, prompt_ids)
        mask: torch.Tensor | None = model_kwargs.get("attention_mask")
        if mask is not None:
            mask = None if bool(mask.all()) else mask.bool().to(input_device(model))
        attention = TreeAttention(self.rules, mask, model.dtype)
        return TreeVerifier(model, cache, model_kwargs, prompt_ids, attention=attention)


def cache_for(model: Any, cache: SlotCache) -> Any:
    """The cache object that the model's forward expects around its self-attention cache."""
    if model.config.is_encoder_decoder:
        return EncoderDecoderCache(cache, DynamicCache())
    return cache
