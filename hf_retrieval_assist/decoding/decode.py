"""What transformers calls in place of its own sampling loop (`custom_generate`)."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from ..host.ranks import Ranks
from ..host.transformers_private import compilations
from ..policy.account import Account
from ..policy.policy import DraftingPolicy
from ..policy.stats import FEWEST_STEPS, PHASES, CallStats
from ..verification.engine import engine_of
from ..verification.service import learn_moves
from ..verification.tiers import Service, Tier
from .call import Call, refused_mode
from .forwards import UnservableError
from .loop import Generation
from .observer import Observe, Observer
from .plainly import decode_at_rest, decode_plainly
from .prompt_parts import feed_parts


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
    if service.tier is not Tier.PLAIN:
        started += feed_parts(call, service.cache_name, policy.reroute, counts)
    if service.tier is Tier.PLAIN:
        counts.reason = service.reason
        result = decode_plainly(call, counts, observer)
    else:
        account = None if observer is not None else _account(call, policy)
        if account is not None and account.rests():
            result = decode_at_rest(call, policy, counts, account)
        else:
            try:
                result = _decode_with_drafts(call, policy, service, counts, observer, account)
            except UnservableError as error:
                call.tell_plain(str(error))
                counts.tier, counts.reason = Tier.PLAIN.value, str(error)
                result = decode_plainly(call, counts, observer)
    if isinstance(call.model, torch.nn.Module):
        learn_moves(call.model)
    counts.seconds["total"] = total = time.perf_counter() - started
    if counts.saved_seconds:
        counts.compared_seconds = total - counts.once_seconds
    policy.count(counts)
    return result


def _account(call: Call, policy: DraftingPolicy) -> Account | None:
    """What tells whether to draft for the call; None: it is drafted for.

    All ranks would have to decide in lockstep.
    """
    if Ranks.of(call.model).several or call.synced_gpus:
        return None
    return policy.account(call.kind) if policy.may_rest() else None


def _decode_with_drafts(
    call: Call,
    policy: DraftingPolicy,
    service: Service,
    counts: CallStats,
    observer: Observer | None,
    account: Account | None,
) -> Any:
    """Decode by the loop; timed from the first token on."""
    started, before = time.perf_counter(), compilations()
    counted = counts.seconds["test"] + counts.seconds["prefill"]
    generation = Generation(call, policy, service, counts, observer)
    result = generation.run()
    once = counts.seconds["prefill"] + counts.once_seconds - counted
    seconds = time.perf_counter() - started - once
    plain_steps, plain_step = generation.tokens - 1, generation.plain_step
    counts.saved_forwards = plain_steps - counts.forwards
    if plain_steps >= FEWEST_STEPS:
        spent = sum(counts.seconds[name] for name in PHASES)
        if plain_step is not None:
            counts.saved_by_drafts = plain_steps * plain_step - spent
        if (theirs := generation.plain.seconds) is not None:
            counts.saved_seconds = plain_steps * theirs - spent
    generation.plain.count(seconds)
    if 2 * counts.repeated >= counts.forwards:
        # Transformers' loop would compute what is repeated in half of the time, and a call of one
        # token says nothing.
        plain_step = None
    # What is compiled is compiled once, and says nothing of calls to come.
    if account is not None and compilations() == before:
        account.count_drafted(seconds, plain_steps, plain_step, counts.recordings > 0)
    return result
