"""Prompts that are fed in parts, between which whoever generates can look about.

A server's long prompt must not keep others waiting, nor go on when nobody waits for its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import perf_counter
from typing import Any, NamedTuple

import torch

from ..cache.kv_cache import has_slots, stands_for
from ..host import transformers_private as private
from ..policy.stats import CallStats
from ..verification.tiers import PER_TOKEN, Service
from .call import Call

# The least part of the first one's tokens that a later one has.
_SHORTEST = 16


class _Parts(NamedTuple):
    tokens: int
    between: Callable[[], None]


_parts: ContextVar[_Parts | None] = ContextVar("how prompts are fed", default=None)


@contextmanager
def prompts_in_parts(tokens: int, between: Callable[[], None]) -> Iterator[None]:
    """A scope whose calls of `generate` feed a prompt by so many tokens at once.

    A prompt is fed whole in a batch, where the call brings more than its ids, where its cache is
    not the usual one, and beside code of the caller's in the forward.

    Args:
        tokens: of the first part, and of a prompt that is fed whole, at most.
        between: called before each part but the last one. It may generate with the same model and
            assistant; what it raises ends the call.
    """
    token = _parts.set(_Parts(tokens, between))
    try:
        yield
    finally:
        _parts.reset(token)


def feed_parts(call: Call, service: Service, rerouted: bool, counts: CallStats) -> float:
    """Feed all parts of a prompt but the last one, where it has any.

    Args:
        service: how the model is served.
        rerouted: whether kernels serve the call.
        counts: the call's figures.

    Returns:
        Seconds that others took in between.
    """
    parts, length = _parts.get(), call.input_ids.shape[1]
    if parts is None or length <= parts.tokens:
        return 0.0
    kwargs, others = call.model_kwargs, 0.0
    cache: Any = kwargs.get(service.cache_name)
    if not _is_usual(call, service, cache):
        return 0.0
    token = _parts.set(None)
    try:
        for start, end in _spans(cache.get_seq_length(), parts.tokens, length):
            ids = call.input_ids[:, start:end]
            begun = perf_counter()
            parts.between()
            left = perf_counter()
            inputs = {name: kwargs.get(name) for name in PER_TOKEN}
            own = {name: x[..., :end] for name, x in inputs.items() if x is not None}
            with call.engine.scope(rerouted):
                private.prefill(call.model, ids, call.config, kwargs | own)
            counts.count_seconds(prefill=perf_counter() - left)
            others += left - begun
    finally:
        _parts.reset(token)
    return others


def _spans(start: int, tokens: int, length: int) -> Iterator[tuple[int, int]]:
    """Where the parts of a prompt begin and end behind what was read, the last one's left out. A
    token takes the longer the more it attends to, twice as long behind two first parts: later
    parts are shorter."""
    while True:
        count = 2 * tokens * tokens // (2 * tokens + start) if start else tokens
        end = start + max(1, tokens // _SHORTEST, count)
        if end >= length:
            return
        yield start, end
        start = end


def _is_usual(call: Call, service: Service, cache: Any) -> bool:
    """Whether a call is one of a single text whose cache parts can be fed into."""
    kwargs = call.model_kwargs
    return (
        call.batch_size == 1
        and has_slots(cache)
        and not private.is_callers(cache)
        and stands_for(cache, call.model, 1)
        and not service.why_whole(call.model, cache, call.input_ids.shape[1])
        and call.config.prefill_chunk_size is None
        and all(
            name in PER_TOKEN and value.shape[-1] == call.input_ids.shape[1]
            for name, value in kwargs.items()
            if isinstance(value, torch.Tensor)
        )
    )
