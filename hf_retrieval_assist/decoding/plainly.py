"""Calls that transformers' own loop decodes."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import DynamicCache, StoppingCriteriaList

from ..cache.kv_cache import go_back, has_slots
from ..host import transformers_private
from ..policy.stats import CallStats
from .call import Call


def decode_plainly(call: Call, counts: CallStats, observer: Any) -> Any:
    """What plain `generate` returns, from the loop that makes it."""
    result, texts = _sampled(call, counts)
    if observer is not None:
        observer.plain(texts)
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
