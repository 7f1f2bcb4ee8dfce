"""One call to `generate`, as transformers hands it over, and how it can be served."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteriaList,
)
from transformers.generation import GenerationMode

from ..drafters.base import Target
from ..system.lazy import cached_property
from ..target import host
from ..target.fingerprint import fingerprint
from ..target.kv_cache import SlotCache, has_slots, has_static_slots
from ..target.service import choose_service
from ..target.tiers import Service, Tier
from ..token_tree import Int32Array
from .row_text import strip_padding
from .selection import follows_rows

logger = logging.getLogger(__name__)

# What asks for other ways of decoding.
_MODE_ARGUMENTS = {
    GenerationMode.CONTRASTIVE_SEARCH: "penalty_alpha",
    GenerationMode.DOLA_GENERATION: "dola_layers",
    GenerationMode.ASSISTED_GENERATION: "prompt_lookup_num_tokens",
}


def refused_mode(config: GenerationConfig) -> str | None:
    """What in a configuration asks for another way of decoding than the loop's; None: nothing."""
    if (config.num_beams or 1) > 1:
        return f"num_beams: expected 1 with an assistant, got {config.num_beams}"
    mode = config.get_generation_mode()
    if mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        return None
    return (
        f"{_MODE_ARGUMENTS.get(mode, 'generation_config')}: expected greedy decoding or "
        f"sampling with an assistant, got {mode.value.replace('_', ' ')}"
    )


@dataclass(frozen=True)
class Call:
    """The arguments of a call, prepared by `generate`.

    Attributes:
        model: a transformers model with a language modelling head.
        input_ids: int64 [batch, length], left-padded.
        processors, criteria, config: as `generate` prepared them.
        model_kwargs: further inputs of the forward, as `generate` prepared them.
        synced_gpus: go on with empty forwards until the other processes have finished.
        streamer: receives every token, of all rows at once.
    """

    model: Any
    input_ids: torch.Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    model_kwargs: dict[str, Any]
    synced_gpus: bool = False
    streamer: Any = None

    @property
    def batch_size(self) -> int:
        return len(self.input_ids)

    @cached_property
    def prompts(self) -> list[Int32Array]:
        """int32 [length] for each row, without padding."""
        rows = strip_padding(self.input_ids, self.model_kwargs.get("attention_mask"))
        return [ids.cpu().numpy().astype(np.int32) for ids in rows]

    @property
    def target(self) -> Target:
        """What is told to drafters of the model."""
        return Target(
            vocab_size=self.model.config.get_text_config(decoder=True).vocab_size,
            device=self.input_ids.device,
            fingerprint=fingerprint(self.model),
            model=self.model,
        )

    def service(self) -> Service:
        """How the call is served: the model's tier, or plain where its arguments demand it."""
        service = choose_service(self.model, self.model_kwargs, self.batch_size)
        why = self._why_plain(service)
        if why is None:
            return service
        if service.tier is not Tier.PLAIN:
            logger.info("%s: plain for this call (%s)", type(self.model).__name__, why)
        return Service(Tier.PLAIN, why)

    def _why_plain(self, service: Service) -> str | None:
        config = self.config
        if config.use_cache is False:
            return "use_cache=False"
        if config.cache_implementation not in (None, "dynamic", "static"):
            return f"cache_implementation={config.cache_implementation!r}"
        cache = self.model_kwargs.get(service.cache_name)
        if not _can_serve(cache, service, self.model.config):
            return "past_key_values is a cache whose tokens cannot be dropped one by one"
        states = config.output_attentions or config.output_hidden_states
        if self.batch_size > 1 and states:
            return "attentions and hidden states of rows with unequal progress do not fit together"
        if self.compiled(service) is None:
            return None
        if service.tier is not Tier.TREE:
            return f"its forwards are compiled, and not for the {service.tier.value} tier"
        if states or host.why_no_mask(self.model.config) is not None:
            return "its forwards are compiled, and take no masks or return states"
        return None

    @cached_property
    def compiled_in_place(self) -> bool:
        """Whether the caller has compiled the model; found once, since it asks every module."""
        return host.is_compiled(self.model)

    def compiled(self, service: Service) -> Callable[..., Any] | None:
        """What is called in the model's place after the prefill, compiled; None: the model."""
        if self.compiled_in_place:
            return self.model.__call__
        if service.split and host.why_no_mask(self.model.config) is not None:
            # Attention in parts serves such models, and is recorded instead of compiled.
            return None
        return host.compiled_call(self.model, self.config, self.model_kwargs)

    def rows_in_step(self, service: Service) -> bool:
        """Whether the rows of the batch have to accept equally many tokens in every step: where
        something may follow all of them from step to step, or their states only go back together.
        """
        if self.batch_size == 1:
            return False
        together = service.tier is Tier.REPLAY or self.streamer is not None
        return together or any(map(follows_rows, (*self.processors, *self.criteria)))

    def keeps_cache(self, service: Service) -> bool:
        """Whether anybody can go on from the cache after the call: it is returned, or was given."""
        given = host.is_callers(self.model_kwargs.get(service.cache_name))
        return given or bool(self.config.return_dict_in_generate)


def _can_serve(cache: Any, service: Service, config: Any) -> bool:
    """Whether the call's cache can serve: made by `generate`, or one that has a slot per token."""
    own = getattr(cache, "self_attention_cache", cache)
    if service.tier is Tier.PLAIN or not (host.is_callers(cache) or host.is_callers(own)):
        return True
    if isinstance(own, StaticCache):
        return own is cache and has_static_slots(own, config)
    return isinstance(own, SlotCache) or has_slots(own)
