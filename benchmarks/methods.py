"""Ways to generate, behind one signature, and what each spends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import CompileConfig

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


def compiled(backend: str = "inductor", mode: str | None = None, **options: Any) -> Method:
    """Plain decoding with a static cache, compiled as transformers compiles it."""
    config = CompileConfig(backend=backend, mode=mode)
    # transformers leaves compiling on a CPU to those who ask for it by this name.
    config._compile_all_devices = True
    options |= {"cache_implementation": "static", "compile_config": config}
    return Method("static cache, compiled", lambda: dict(options))


def baselines() -> list[Method]:
    """What transformers brings along."""
    return [Method("plain", dict), prompt_lookup()]


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
        split: seconds of each phase of the steps; of transformers' own methods "prefill" and
            "forward" where they were clocked, else empty.
    """

    tokens: int
    forwards: int
    seconds: float
    ids: torch.Tensor
    nodes: int | None
    split: dict[str, float]


@contextmanager
def timed_forwards(model: torch.nn.Module) -> Iterator[list[float]]:
    """Scope of a list to which every forward of a model appends its seconds."""
    began: list[float] = []
    seconds: list[float] = []
    hooks = [
        model.register_forward_pre_hook(lambda *_: began.append(time.perf_counter())),
        model.register_forward_hook(lambda *_: seconds.append(time.perf_counter() - began[-1])),
    ]
    try:
        yield seconds
    finally:
        for hook in hooks:
            hook.remove()


def run_method(
    method: Method, model: Any, inputs: dict[str, Any], clocked: bool = False, **options: Any
) -> Run:
    """Call `generate` once.

    Args:
        clocked: whether to time the forwards of transformers' own methods, by hooks.
    """
    own = method.options()
    assistant = own.get("assistant")
    # Plain decoding runs a forward for each token, and what it compiles would see a hook.
    # Assistants count their forwards, and decode a model with hooks plainly.
    hooked = clocked or "prompt_lookup_num_tokens" in own
    hooked = hooked and assistant is None
    with timed_forwards(model) if hooked else nullcontext([]) as timed, method.scope():
        wait(model.device)
        started = time.perf_counter()
        ids = model.generate(**inputs, **options, **own)
        wait(model.device)
        seconds = time.perf_counter() - started
    new = ids[:, inputs["input_ids"].shape[1] :].cpu()
    forwards, nodes, split = len(timed) or new.shape[1], None, {}
    if clocked and timed:
        split = {"prefill": timed[0], "forward": sum(timed[1:])}
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
