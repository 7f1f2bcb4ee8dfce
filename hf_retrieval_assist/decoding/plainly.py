"""Calls that transformers' own loop decodes: because it has to, or because it is faster."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, StoppingCriteriaList

from ..drafting.policy import DraftingPolicy
from ..host import transformers_private
from ..kernels.reroute import reroute
from ..stats import CallStats
from ..verification.kv_cache import go_back, has_slots
from .call import Call

if TYPE_CHECKING:
    from ..record import CallRecord


def decode_plainly(call: Call, counts: CallStats, record: CallRecord | None) -> Any:
    """What plain `generate` returns, from the loop that makes it."""
    result, texts = _sampled(call, counts)
    if record is not None:
        record.plain(texts)
    return result


def decode_at_rest(call: Call, assistant: DraftingPolicy, counts: CallStats, rerouted: bool) -> Any:
    """The same where drafting has not paid lately; drafters learn the texts afterwards.

    `rerouted`: by the kernels that serve drafted calls, by which batches gain too.
    """
    with reroute(rerouted):
        result, texts = _sampled(call, counts)
    for prompt_ids, token_ids in zip(call.prompts, texts, strict=True):
        with closing(assistant.start(prompt_ids, call.target)) as session:
            session.learn_plain(token_ids)
    return result


def _sampled(call: Call, counts: CallStats) -> tuple[Any, list[list[int]]]:
    """What transformers' own loop returns, and the rows' generated tokens without padding."""
    watch = _Watch(call)
    try:
        result = transformers_private.sample(
            call.model,
            call.input_ids,
            logits_processor=call.processors,
            stopping_criteria=watch,
            generation_config=call.config,
            synced_gpus=call.synced_gpus,
            streamer=call.streamer,
            **call.model_kwargs,
        )
    except BaseException:
        if watch.cache is not None:
            go_back(watch.cache, call.model.config, watch.held)
        raise
    counts.seconds["forward"] = time.perf_counter() - watch.started
    sequences = result if isinstance(result, torch.Tensor) else result.sequences
    texts = sequences[:, call.input_ids.shape[1] :].tolist()
    if call.stopping.has_eos:  # otherwise nothing is padded
        lengths = watch.lengths.tolist()
        texts = [text[:length] for text, length in zip(texts, lengths, strict=True)]
    counts.count_plain([len(text) for text in texts])
    return result, texts


class _Watch(StoppingCriteriaList):
    """A call's criteria; notes when the first token was there, and when each row ended.

    Attributes:
        started: on the clock of `time.perf_counter`.
        lengths: int64 [batch], tokens that were generated before a row had ended.
        cache: the caller's own; None where `generate` made it.
        held: tokens per row in that cache after the last forward that ended; 0 where its layers
            keep something else.
    """

    def __init__(self, call: Call) -> None:
        super().__init__(call.criteria)
        self.started = 0.0
        self.lengths = call.input_ids.new_zeros(call.batch_size)
        self._growing = torch.ones_like(self.lengths, dtype=torch.bool)
        given = filter(transformers_private.is_callers, call.model_kwargs.values())
        self.cache: Any = next(given, None)
        own: Any = getattr(self.cache, "self_attention_cache", self.cache)
        self._slots: DynamicCache = own if has_slots(own) else DynamicCache()
        self.held = self._slots.get_seq_length()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.started = self.started or time.perf_counter()
        self.held = self._slots.get_seq_length()
        self.lengths = self.lengths + self._growing
        done = super().__call__(input_ids, scores, **kwargs)
        self._growing = self._growing & ~done
        return done
