"""Ways to generate, behind one signature, and what each spends inside the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from hf_retrieval_assist import Assistant

from .baselines import LOOKUP_TOKENS

Generate = Callable[..., torch.Tensor]


@dataclass
class Method:
    """A way to call `generate`.

    Attributes:
        name: as printed.
        options: keyword arguments made anew for every call, so that nothing learnt in one run of
            a comparison helps the next.
        max_batch: the largest batch it supports; None without limit.
        scope: that the call is made in.
    """

    name: str
    options: Callable[[], dict[str, Any]]
    max_batch: int | None = None
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext


def baselines() -> list[Method]:
    """What transformers brings along."""
    return [
        Method("plain", dict),
        Method("prompt lookup", lambda: {"prompt_lookup_num_tokens": LOOKUP_TOKENS}, 1),
    ]


def draft_model(model: Any) -> Method:
    """transformers' assisted decoding with a smaller model."""
    return Method("draft model", lambda: {"assistant_model": model}, 1)


def assisted(name: str, make: Callable[[], Assistant]) -> Method:
    """One of our assistants."""
    return Method(name, lambda: {"assistant": make()})


class ForwardClock:
    """Counts and times a model's forwards. Where CUDA runs them, by events and without waiting."""

    def __init__(self, device: torch.device) -> None:
        self.calls = 0
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []

    @contextmanager
    def watching(self, model: torch.nn.Module) -> Iterator[ForwardClock]:
        """Watch a model until the block ends."""
        # Hooks of the model's own would be part of what its forwards are tested with.
        self._model = model
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave)
        try:
            yield self
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: torch.nn.Module, *_: Any) -> None:
        if module is not self._model:
            return
        self.calls += 1
        self._started = self._mark()

    def _leave(self, module: torch.nn.Module, *_: Any) -> None:
        if module is not self._model:
            return
        ended = self._mark()
        if self._cuda:
            self._events.append((self._started, ended))
        else:
            self._seconds += ended - self._started

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> float:
        """Seconds inside the model so far."""
        if self._events:
            torch.cuda.synchronize()
        return self._seconds + sum(start.elapsed_time(end) for start, end in self._events) / 1e3


@dataclass
class Run:
    """One call of one method.

    Attributes:
        tokens: generated tokens, all rows together.
        forwards: forwards of the target, the prefill among them.
        forward_seconds: inside the target.
        seconds: wall clock of the call.
        split: seconds in draft, walk and cache; empty for transformers' own methods.
        ids: [batch, new tokens].
    """

    tokens: int
    forwards: int
    forward_seconds: float
    seconds: float
    split: dict[str, float]
    ids: torch.Tensor


def run_method(method: Method, model: Any, inputs: dict[str, Any], **options: Any) -> Run:
    """Call `generate` once, watched."""
    clock = ForwardClock(model.device)
    own = method.options()
    with clock.watching(model), method.scope():
        started = time.perf_counter()
        ids = model.generate(**inputs, **options, **own)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    new = ids[:, inputs["input_ids"].shape[1] :].cpu()
    assistant = own.get("assistant")
    split = dict(assistant.stats.last.seconds) if assistant is not None else {}
    return Run(new.numel(), clock.calls, clock.seconds(), seconds, split, new)
