"""The ways in which drafts are verified, and what each of them needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from transformers import DynamicCache, EncoderDecoderCache

from ..cache.kv_cache import appends_layers
from ..host.transformers_private import CACHE, masks_windows
from .reach import UNLIMITED, Reach
from .tree_attention import LayerMask, Rules

PER_TOKEN = frozenset(
    (
        *("attention_mask", "decoder_attention_mask", "position_ids", "decoder_position_ids"),
        *("token_type_ids", "mm_token_type_ids"),
    )
)
"""Inputs with one entry per token, of which steps know those of tokens to come."""


class Tier(StrEnum):
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
        slides: whether all layers have a window.
        cache_name: the forward's keyword for the cache.
        attention_by: "mask": the model's own attention under a mask; else the kernels that compute
            it, by the name that their engine gives them.
        packed: whether it feeds the rows of a batch behind one another, without padding.
        static_buffers: whether the tree tier verifies in static buffers.
        width: tokens per row that a forward may feed.
        reach: how far it may reach.
        foreign: whether code that no known library has written runs in it, on its owner's word.
    """

    tier: Tier
    reason: str
    rules: Rules = field(default_factory=LayerMask)
    slides: bool = False
    cache_name: str = CACHE
    attention_by: str = "mask"
    packed: bool = False
    static_buffers: bool = False
    width: int = 1 << 30
    reach: Reach = UNLIMITED
    foreign: bool = False

    def why_whole(self, model: Any, cache: Any, length: int) -> str:
        """Why tokens of a text of this length are other ones to the model when they are fed in
        parts; empty where they are not."""
        if self.reach.meets(0, length):
            return "its rotary frequencies follow the length of the text"
        if any(layer.is_sliding for layer in cache.layers) and not masks_windows(model):
            return "its forwards see what their windows have passed"
        if appends_layers(model.config):
            return "its forwards append layers to the cache"
        return ""

    def forgets(self, batch: int) -> bool:
        """Whether layers with a window may forget what lies beyond it.

        Where layers of all kinds get one mask, they show equally many slots. Rows of a batch get on
        unequally, by any number of slots, which static buffers have no room for.
        """
        if self.static_buffers and batch > 1:
            return False
        return self.slides or self.tier is not Tier.TREE or not isinstance(self.rules, LayerMask)


def cache_for(model: Any, cache: DynamicCache) -> Any:
    """The cache object that the model's forward expects around its self-attention cache."""
    if model.config.is_encoder_decoder:
        return EncoderDecoderCache(cache, DynamicCache())
    return cache


def has_padding(model_kwargs: dict[str, Any]) -> bool:
    """Whether a mask hides something."""
    mask = model_kwargs.get("attention_mask")
    return mask is not None and not bool(mask.all())
