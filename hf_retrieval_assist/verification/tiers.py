"""The ways in which drafts are verified, and what each of them needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from ..cache.kv_cache import SlotCache
from ..cache.slot_layers import SlotLayer
from ..cache.states import SavedStates, States
from ..engines.cuda.fixed_attention import AttentionBy
from ..engines.cuda.fixed_memory import can_stay
from ..engines.cuda.fixed_verifier import WIDTHS, FixedVerifier, ForwardOptions
from ..engines.cuda.workspace import WORKSPACES
from ..host.lookups import ForwardLookups
from ..host.transformers_private import CACHE, input_device, is_callers, why_no_mask
from .chain_verifier import ChainVerifier
from .reach import UNLIMITED, Reach
from .tree_attention import LayerMask, Rules, TreeAttention
from .verifiers import TreeVerifier, Verifier


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
        attention_by: what computes attention where the tree tier verifies in place.
        packed: whether it feeds the rows of a batch behind one another, without padding.
        in_place: whether the tree tier verifies in memory that stays where it is.
        width: tokens per row that a forward may feed.
        reach: how far it may reach.
        lookups: what the model's forward looked up when it was tested; None: it was not.
        lacked_hooks: whether the model failed its tests without hooks of the caller's that were not
            known to change anything.
    """

    tier: Tier
    reason: str
    rules: Rules = field(default_factory=LayerMask)
    slides: bool = False
    cache_name: str = CACHE
    attention_by: AttentionBy = "mask"
    packed: bool = False
    in_place: bool = False
    width: int = 1 << 30
    reach: Reach = UNLIMITED
    lookups: ForwardLookups | None = field(default=None, compare=False, repr=False)
    lacked_hooks: bool = False

    def verifier(
        self,
        model: Any,
        cache: SlotCache,
        model_kwargs: dict[str, Any],
        prompt_ids: torch.Tensor,
        options: ForwardOptions,
    ) -> Verifier:
        """The verifier of this tier, for one call whose prefill is done."""
        arguments = model, cache, model_kwargs, prompt_ids
        stays = self.in_place and can_stay(cache, input_device(model))
        if not stays:
            cache.house()
        unmasked = not stays and why_no_mask(model.config) is not None
        verifier: Verifier
        if self.tier is not Tier.TREE or unmasked:
            states = SavedStates if self.tier is Tier.REPLAY else States
            verifier = ChainVerifier(*arguments, states=states(cache))
        else:
            mask = None
            if has_padding(model_kwargs):
                mask = model_kwargs["attention_mask"].bool().to(input_device(model))
            attention = TreeAttention(self.rules, mask, model.dtype)
            if stays:
                verifier = FixedVerifier(
                    *arguments, attention=attention, options=options, by=self.attention_by
                )
            else:
                verifier = TreeVerifier(
                    *arguments,
                    attention=attention,
                    packed=self.packed,
                    repeats=self.lookups if options.repeats else None,
                )
        verifier.most_tokens = options.most_tokens
        verifier.most_fed = self._most_fed(verifier, options.fixed_width)
        verifier.reach = self.reach
        return verifier

    def forgets(self, batch: int) -> bool:
        """Whether layers with a window may forget what lies beyond it.

        Where layers of all kinds get one mask, they show equally many slots. Rows of a batch get on
        unequally, by any number of slots, which memory that stays in place has no room for.
        """
        if self.in_place and batch > 1:
            return False
        return self.slides or self.tier is not Tier.TREE or not isinstance(self.rules, LayerMask)

    def _most_fed(self, verifier: Verifier, fixed: int | None) -> int:
        """Tokens per row that a forward may feed, at any or at a fixed width."""
        if fixed is None:
            return self.width
        if not isinstance(verifier, FixedVerifier):
            raise ValueError(
                "fixed_width: expected None where no memory stays in place, as on a CPU, "
                f"got {fixed}"
            )
        if fixed not in (tested := [width for width in WIDTHS if width <= self.width]):
            raise ValueError(f"fixed_width: expected one of {tested}, got {fixed}")
        return fixed


def slot_cache(
    model: Any, model_kwargs: dict[str, Any], service: Service, batch: int, capacity: int
) -> tuple[SlotCache, Any]:
    """Put a slot cache in the place of the one that `generate` prepared.

    Args:
        model_kwargs: `generate`'s, with the cache under the service's name for it.
        service: that will verify with it.
        batch: rows.
        capacity: slots that each row will need, as far as that is known.

    Returns:
        The slot cache, and what the call leaves: the one that was there, where it stands for that.
    """
    config = model.config.get_text_config(decoder=True)
    name, forgets = service.cache_name, service.forgets(batch)
    given: Any = model_kwargs.get(name)
    own = getattr(given, "self_attention_cache", given)
    if is_callers(given):
        cache = SlotCache.around(own, config, capacity, forgets)
    else:
        if type(own) not in (DynamicCache, StaticCache):
            own = DynamicCache(config=config)
            given = cache_for(model, own)
        made = own.layers if type(own) is DynamicCache else ()
        cache = SlotCache(config, 0 if service.in_place else capacity, forgets, made)
        cache.lender, cache.in_place = own, service.in_place
        if service.in_place:
            # It begins where an earlier call of the model was served.
            cache.reserved = found = WORKSPACES.reserve(model, batch, capacity + WIDTHS[-1])
            if found is not None:
                found.arena.offer([x for x in cache.layers if isinstance(x, SlotLayer)])
    model_kwargs[name] = cache
    if isinstance(given, EncoderDecoderCache):
        model_kwargs[name] = EncoderDecoderCache(cache, given.cross_attention_cache)
        model_kwargs[name].is_updated = given.is_updated
    return cache, given


def cache_for(model: Any, cache: DynamicCache) -> Any:
    """The cache object that the model's forward expects around its self-attention cache."""
    if model.config.is_encoder_decoder:
        return EncoderDecoderCache(cache, DynamicCache())
    return cache


def has_padding(model_kwargs: dict[str, Any]) -> bool:
    """Whether a mask hides something."""
    mask = model_kwargs.get("attention_mask")
    return mask is not None and not bool(mask.all())
