"""One call to `generate`, as transformers hands it over, and how it can be served."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.generation import GenerationMode

from ..cache.kv_cache import stands_for
from ..drafters.base import Target
from ..host import transformers_private
from ..host.fingerprint import fingerprint
from ..host.plain_step import is_known_streamer, own_methods_of
from ..host.ranks import Ranks
from ..policy.cost_store import CostKey, size_bucket
from ..policy.policy import DraftingPolicy, Graphs
from ..system.lazy import cached_property
from ..system.log import get_logger
from ..system.reloads import LOADED
from ..types.row_text import RowText, strip_padding
from ..types.token_tree import Int32Array
from ..verification.engine import Engine, engine_of
from ..verification.options import ServiceDemand
from ..verification.service import choose_service
from ..verification.tiers import PER_TOKEN, Service, Tier
from .selection import known_kinds
from .stopping import Stopping

logger = get_logger(__name__)

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


_PLAIN = Service(Tier.PLAIN, "")


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
        """int32 [length] for each row, without padding, as drafters are told them."""
        rows = strip_padding(self.input_ids, self.model_kwargs.get("attention_mask"))
        return [self.target.known(ids.cpu()) for ids in rows]

    @cached_property
    def device(self) -> torch.device:
        """Where the model wants its inputs, wherever the ids were left."""
        try:
            return transformers_private.input_device(self.model)
        except Exception:  # whatever a model raises that cannot say; it is decoded plainly
            return self.input_ids.device

    @cached_property
    def engine(self) -> Engine:
        """What computes the forwards of a model that is served."""
        return engine_of(self.device)

    @cached_property
    def target(self) -> Target:
        """What is told to drafters of the model."""
        return Target(
            vocab_size=self.model.config.get_text_config(decoder=True).vocab_size,
            device=self.input_ids.device,
            fingerprint=self.kind.fingerprint,
            model=self.model,
        )

    @cached_property
    def stopping(self) -> Stopping:
        """When its rows end."""
        return Stopping(self.criteria)

    @property
    def room(self) -> int:
        """Generated tokens per row that buffers are made for."""
        limit = self.stopping.max_length
        # They double when a call has no limit or a far one.
        return 256 if limit is None else min(max(1, limit - self.input_ids.shape[1]), 4096)

    def texts(self) -> list[RowText]:
        """Its rows as they begin."""
        pad = transformers_private.pad_token(self.config) if self.stopping.has_eos else None
        pad_id = None if pad is None else int(pad)
        return [RowText(i, ids, self.room, pad_id) for i, ids in enumerate(self.input_ids)]

    def may_record(self, graphs: Graphs) -> bool:
        """Whether forwards may be repeated from recordings, as far as `graphs`, the assistant's
        option, allows it."""
        return bool(graphs) and not self.synced_gpus and not Ranks.of(self.model).several

    def service(self, policy: DraftingPolicy) -> Service:
        """How the call is served: the model's tier, or plain where its arguments demand it.

        Args:
            policy: says how many nodes are verified at most, and whether the model is trusted.
        """
        if (why := LOADED.why_stale()) is not None:
            return self._plain(why)
        if not isinstance(self.model, torch.nn.Module):
            return self._plain("it is no torch module, whose parts could be looked at")
        few, fixed = not self.engine.widens, policy.fixed_width
        records = self.may_record(policy.graphs) and self.engine.records(self.model)
        demand = ServiceDemand(
            width=fixed or 1 + policy.planner.most_nodes(few=few),
            static_buffers=records or fixed is not None,
            trusts=policy.trust_forward,
        )
        service = choose_service(self.model, self.model_kwargs, self.batch_size, demand)
        why = service.reason if service.tier is Tier.PLAIN else self._why_plain(service)
        return service if why is None else self._plain(why, service)

    def _plain(self, why: str, service: Service = _PLAIN) -> Service:
        """Plain decoding, of a model that drafts could be verified with by a service."""
        self.tell_plain(why)
        return replace(service, tier=Tier.PLAIN, reason=why)

    def tell_plain(self, why: str) -> None:
        """Say once why calls like this one are decoded plainly."""
        logger.warning_once(f"{type(self.model).__name__}: the assistant cannot draft here: {why}")

    def _why_plain(self, service: Service) -> str | None:
        config = self.config
        if config.use_cache is False:
            return "use_cache is False; set it to True"
        if config.cache_implementation not in (None, "dynamic", "static"):
            return (
                f"cache_implementation is {config.cache_implementation!r}; leave it out, or use "
                '"dynamic" or "static"'
            )
        cache = self.model_kwargs.get(service.cache_name)
        if not self._can_serve(cache, service):
            return (
                f"tokens of {service.cache_name} cannot be dropped one by one, or it keeps others "
                "than the model's own; pass a DynamicCache made from the model's configuration"
            )
        if (name := self._unknown_input) is not None:
            return f"{name} has an entry for each token, and nobody knows those of tokens to come"
        if transformers_private.is_callers(cache) and (own := own_methods_of(cache)):
            return f"{own[0]} of {service.cache_name} is the caller's, and drafts do not call it"
        if self.asks_caller and transformers_private.is_callers(cache):
            return (
                "a logits processor, stopping criterion or streamer of the caller's may look into "
                f"{service.cache_name}, where nothing lies meanwhile; leave out either"
            )
        if config.output_attentions or config.output_hidden_states:
            return "it returns attentions or hidden states of each token; ask for none"
        if (why := self._why_together(service)) is not None:
            return why
        start, stop = self._lengths
        # The prefill passes it where the prompt is longer.
        if service.reach.restart is not None and service.reach.restart < stop:
            return (
                "the model drops its cache at a length that the text may get to; ask for fewer new "
                "tokens"
            )
        if service.tier is Tier.REPLAY and service.reach.meets(start, stop - 1):
            return (
                "the model processes positions that the text may get to one by one; ask for fewer "
                "new tokens"
            )
        return None

    def _can_serve(self, cache: Any, service: Service) -> bool:
        """Whether its cache can serve: made by `generate`, or one that ours can stand for."""
        own = getattr(cache, "self_attention_cache", cache)
        if service.tier is Tier.PLAIN or not (
            transformers_private.is_callers(cache) or transformers_private.is_callers(own)
        ):
            return True
        if own is not cache and (type(cache), type(own)) != (EncoderDecoderCache, DynamicCache):
            return False
        return stands_for(own, self.model, self.batch_size)

    @property
    def _unknown_input(self) -> str | None:
        """An input with one entry per token of the prompt of which steps do not know more."""
        shape = self.input_ids.shape
        found = (
            name
            for name, value in self.model_kwargs.items()
            if isinstance(value, torch.Tensor) and value.shape[:2] == shape
            if name not in PER_TOKEN and name not in ("inputs_embeds", "cache_position")
        )
        return next(found, None) if shape[1] > 1 else None

    @cached_property
    def asks_caller(self) -> bool:
        """Whether code that is not known runs between forwards, which may change anything."""
        return self._follows_rows or not (self.streamer is None or is_known_streamer(self.streamer))

    @cached_property
    def _follows_rows(self) -> bool:
        """Whether a processor, a criterion or what asks them is none of those that are known."""
        members = *self.processors, *self.criteria
        return not known_kinds(members).issuperset(map(type, members))

    @property
    def _lengths(self) -> tuple[int, int]:
        """The length of the shortest prompt, and one that no row's text gets to."""
        # A criterion of the caller's may move the limit while the text grows.
        limit = None if self._follows_rows else self.stopping.max_length
        length = self.input_ids.shape[1]
        # Embeddings in the place of ids are not counted among a text's tokens.
        unseen = self.prompt_length - length
        stop = sys.maxsize if limit is None else max(limit, length + 1) + unseen
        mask = self.model_kwargs.get("attention_mask")
        if mask is None or mask.ndim != 2:
            return 0, stop
        return int(mask.sum(-1).min()), stop

    @property
    def prompt_length(self) -> int:
        """Tokens per row that the prefill processes or finds in the cache."""
        length = self.input_ids.shape[1]
        embeds = self.model_kwargs.get("inputs_embeds")
        return length or (0 if embeds is None else embeds.shape[1])

    @cached_property
    def kind(self) -> CostKey:
        """What tells the calls that have one account with this one: what plain would run."""
        cost_variant = "compiled" if self.compiles_plainly else ""
        key = cost_key(self.model, self.input_ids)
        return replace(key, cost_variant=cost_variant, device=str(self.device))

    @cached_property
    def compiles_plainly(self) -> bool:
        """Whether plain decoding compiles its forwards."""
        return transformers_private.compiles(self.model, self.config, self.model_kwargs)

    def _why_together(self, service: Service) -> str | None:
        """Why the rows of the batch would have to accept equally many tokens in every step, for
        which they are decoded plainly; None: they need not."""
        if self.batch_size == 1:
            return None
        config = self.config
        if service.tier is Tier.REPLAY:
            return "recurrent states of a batch only go back together; generate one text a call"
        if self.streamer is not None or self.asks_caller:
            return (
                "a logits processor, stopping criterion or streamer of the caller's may follow all "
                "rows of the batch from token to token; generate one text a call"
            )
        if service.reach.meets(*self._lengths):
            return (
                "all rows of the batch change their positions together at a length that the texts "
                "may get to; generate one text a call, or fewer new tokens"
            )
        scores = config.return_dict_in_generate and (config.output_scores or config.output_logits)
        if scores and self.stopping.has_eos:
            # Plain decoding returns what the model makes of the padding of rows that have ended.
            return "it returns scores of a batch whose rows may end early; ask for none"
        return None

    def cache_outlives_call(self, service: Service) -> bool:
        """Whether anybody can go on from the cache after the call: it is returned, or was given."""
        given = transformers_private.is_callers(self.model_kwargs.get(service.cache_name))
        return given or bool(self.config.return_dict_in_generate)


def cost_key(model: Any, input_ids: torch.Tensor) -> CostKey:
    """What t(n) depends on where a call with these inputs begins, int64 [batch, length]."""
    return CostKey(
        fingerprint=fingerprint(model),
        device=str(input_ids.device),
        dtype=str(getattr(model, "dtype", None)),  # which plain decoding does without
        attention=str(transformers_private.attention_of(model.config)),
        batch_size=size_bucket(len(input_ids)),
        cache_length=size_bucket(0),
    )
