"""Ways to generate, behind one signature, and what each spends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from hf_retrieval_assist import Assistant

from .baselines import LOOKUP_TOKENS


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


def prompt_lookup(tokens: int = LOOKUP_TOKENS) -> Method:
    """transformers' own drafts from the prompt."""
    return Method("prompt lookup", lambda: {"prompt_lookup_num_tokens": tokens}, 1)


def baselines() -> list[Method]:
    """What transformers brings along."""
    return [Method("plain", dict), prompt_lookup()]


def draft_model(model: Any) -> Method:
    """transformers' assisted decoding with a smaller model."""
    return Method("draft model", lambda: {"assistant_model": model}, 1)


def assisted(name: str, make: Callable[[], Assistant]) -> Method:
    """One of our assistants."""
    return Method(name, lambda: {"assistant": make()})


@dataclass
class Run:
    """One call of one method.

    Attributes:
        tokens: generated tokens, all rows together.
        forwards: forwards of the target, the prefill among them.
        seconds: wall clock of the call.
        ids: [batch, new tokens].
        nodes: drafted tokens that were verified; None for transformers' own methods.
        split: seconds of each phase of the steps; empty for transformers' own methods.
    """

    tokens: int
    forwards: int
    seconds: float
    ids: torch.Tensor
    nodes: int | None
    split: dict[str, float]


@contextmanager
def counted_forwards(model: torch.nn.Module) -> Iterator[list[None]]:
    """Scope of a list that grows by one with every forward of a model."""
    forwards: list[None] = []
    hook = model.register_forward_pre_hook(lambda *_: forwards.append(None))
    try:
        yield forwards
    finally:
        hook.remove()


def run_method(method: Method, model: Any, inputs: dict[str, Any], **options: Any) -> Run:
    """Call `generate` once."""
    own = method.options()
    assistant = own.get("assistant")
    # Plain decoding runs a forward for each token, and what it compiles would see a hook.
    # Assistants count their forwards, and test a model with hooks anew.
    unknown = bool(own.keys() & {"prompt_lookup_num_tokens", "assistant_model"})
    with counted_forwards(model) if unknown else nullcontext([]) as counted, method.scope():
        wait(model.device)
        started = time.perf_counter()
        ids = model.generate(**inputs, **options, **own)
        wait(model.device)
        seconds = time.perf_counter() - started
    new = ids[:, inputs["input_ids"].shape[1] :].cpu()
    forwards, nodes, split = len(counted) or new.shape[1], None, {}
    if assistant is not None:
        stats = assistant.stats.last
        forwards, nodes, split = 1 + stats.forwards, stats.drafted, dict(stats.seconds)
    return Run(new.numel(), forwards, seconds, new, nodes, split)


def tokens_per_forward(runs: Sequence[Run]) -> float:
    return sum(run.tokens for run in runs) / sum(run.forwards for run in runs)


def wait(device: torch.device) -> None:
    """Wait until a device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
