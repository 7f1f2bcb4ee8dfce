"""Calls that transformers' own loop decodes: because it has to, or because it is faster."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from ..kernels.reroute import reroute
from ..stats import CallStats
from ..target import host
from .call import Call
from .stopping import Stopping

if TYPE_CHECKING:
    from ..assistants import Assistant
    from ..record import CallRecord


def decode_plainly(call: Call, counts: CallStats, record: CallRecord | None) -> Any:
    """What plain `generate` returns, from the loop that makes it."""
    result = host.sample(
        call.model,
        call.input_ids,
        logits_processor=call.processors,
        stopping_criteria=call.criteria,
        generation_config=call.config,
        synced_gpus=call.synced_gpus,
        streamer=call.streamer,
        **call.model_kwargs,
    )
    generated = _generated(call, result)
    counts.count_plain(generated.shape[1], call.batch_size)
    if record is not None:
        record.plain(generated.tolist())
    return result


def decode_at_rest(call: Call, assistant: Assistant, counts: CallStats) -> Any:
    """The same where drafting has not paid lately; drafters learn the texts afterwards.

    By the kernels that serve drafted calls: batches gain by those too, and a call's text does not
    depend on whether it rests.
    """
    clock = _Clock(call.input_ids)
    timed = replace(call, criteria=StoppingCriteriaList([*call.criteria, clock]))
    with reroute(assistant.reroute and call.input_ids.device.type == "cpu"):
        result = decode_plainly(timed, counts, None)
    counts.seconds["forward"] = time.perf_counter() - clock.started
    for prompt_ids, token_ids in zip(call.prompts, _texts(call, result), strict=True):
        with closing(assistant.start(prompt_ids, call.target)) as session:
            session.defer(token_ids)
    return result


class _Clock(StoppingCriteria):
    """Stops nothing; notes when the first token was there."""

    def __init__(self, input_ids: torch.Tensor) -> None:
        self.started = 0.0
        self._nothing = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.started = self.started or time.perf_counter()
        return self._nothing


def _generated(call: Call, result: Any) -> torch.Tensor:
    """int64 [batch, tokens]: what follows the prompts in a result of `generate`."""
    sequences = result if isinstance(result, torch.Tensor) else result.sequences
    return sequences[:, call.input_ids.shape[1] :]


def _texts(call: Call, result: Any) -> Iterator[list[int]]:
    """The rows' generated tokens without the padding behind their ends."""
    ends = Stopping(call.criteria).eos_ids
    given = host.pad_token(call.config)
    pads = set() if given is None else {int(given)} - ends
    for row in _generated(call, result).tolist():
        length = next((i for i, token in enumerate(row, 1) if token in ends), len(row))
        while length > 1 and row[length - 1] in pads:
            length -= 1
        yield row[:length]
