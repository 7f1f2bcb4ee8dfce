"""What transformers calls in place of its own sampling loop (`custom_generate`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from ..policy.policy import DraftingPolicy
from ..policy.stats import FEWEST_STEPS, PHASES, CallStats
from ..types.token_tree import Int32Array
from ..verification.engine import UnservableError, engine_of
from ..verification.service import learn_moves
from ..verification.tiers import Service, Tier
from .call import Call, refused_mode
from .kept_prefix import KeptPrefix
from .loop import Generation
from .plainly import decode_plainly
from .prompt_parts import feed_parts

Observe: TypeAlias = Callable[[Sequence[Int32Array], CallStats], Any]
"""Makes what is told the steps of a call, a `CallRecord` of its records; None: nothing is."""


def decode(
    model: Any,
    policy: DraftingPolicy,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: Any = None,
    *,
    observe: Observe,
    **model_kwargs: Any,
) -> Any:
    """Generate as transformers' sampling loop does, in fewer forwards.

    Args:
        model: a transformers model with a language modelling head.
        policy: where drafts come from.
        input_ids: int64 [batch, length], left-padded.
        logits_processor, stopping_criteria, generation_config: as `generate` prepared them.
        synced_gpus: go on with empty forwards until the other processes have finished.
        streamer: receives every token, of all rows at once.
        observe: gives what is told the steps of a call of these prompts and figures.
        model_kwargs: further inputs of the forward, as `generate` prepared them.

    Returns:
        What `generate` returns: int64 [batch, length], or an output object.
    """
    call = Call(
        model,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        model_kwargs,
        bool(synced_gpus),
        streamer,
    )
    if (refusal := refused_mode(generation_config)) is not None:
        raise ValueError(refusal)
    with engine_of(input_ids.device).scopes_left():
        return _decode(call, policy, observe)


def _decode(call: Call, policy: DraftingPolicy, observe: Observe) -> Any:
    started = time.perf_counter()
    service = call.service(policy)
    counts = CallStats(tier=service.tier.value, calls=1)
    counts.seconds["test"] = time.perf_counter() - started
    observer = observe(call.prompts, counts)
    if service.tier is Tier.PLAIN:
        counts.reason = service.reason
        result = decode_plainly(call, counts, observer)
    else:
        kept = KeptPrefix.of(call, policy, service, counts)
        if kept is not None:
            kept.take(counts)
        started += feed_parts(call, service, policy.reroute, counts)
        try:
            result = _decode_with_drafts(call, policy, service, kept, counts, observer)
        except UnservableError as error:
            call.tell_plain(str(error))
            counts.read_before = 0
            counts.tier, counts.reason = Tier.PLAIN.value, str(error)
            result = decode_plainly(call, counts, observer)
    if isinstance(call.model, torch.nn.Module):
        learn_moves(call.model)
    counts.seconds["total"] = total = time.perf_counter() - started
    if counts.saved_seconds:
        counts.compared_seconds = total - counts.once_seconds
    policy.count(counts)
    return result


def _decode_with_drafts(
    call: Call,
    policy: DraftingPolicy,
    service: Service,
    kept: KeptPrefix | None,
    counts: CallStats,
    observer: Any,
) -> Any:
    generation = Generation(call, policy, service, kept, counts, observer)
    result = generation.run()
    plain_steps = generation.tokens - 1
    counts.saved_forwards = plain_steps - counts.forwards
    if plain_steps >= FEWEST_STEPS and (undrafted := generation.undrafted_step) is not None:
        spent = sum(counts.seconds[name] for name in PHASES)
        counts.saved_seconds = plain_steps * undrafted - spent
    return result
