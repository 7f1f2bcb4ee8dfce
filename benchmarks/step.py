"""Where the time of a verification step goes, on a real model on the CPU.

Each figure is the median, over calls of `generate`, of milliseconds per step. The forward is split
by hooks on all modules; a module's time is its own, without what its parts take. The hooks are
PyTorch's global ones.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.cache.kv_cache import SlotLayer

from .inputs import load
from .kernel import real_text
from .report import Report, Table
from .timing import alternate

CONTEXTS = (64, 400, 1500)
NODES = (0, 7, 15, 31)
COLUMNS = {
    "context": "context",
    "rows": "rows fed",
    "kernels": "kernels",
    "total": "ms per step",
    "linears": "linears",
    "attention": "attention",
    "norms": "norms",
    "cache": "cache",
    "model": "rest of model",
    "inputs": "masks, inputs",
    "walk": "walk",
    "draft": "draft",
}


class Stopwatch:
    """Seconds that each kind of work takes by itself, what it calls not counted."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._open: list[tuple[str, float]] = []
        self._since = 0.0

    def _turn(self) -> None:
        """Book the time since the last change on what is running."""
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1][0]] += now - self._since
        self._since = now

    def enter(self, kind: str) -> None:
        self._turn()
        self._open.append((kind, self._since))

    def leave(self) -> float:
        """Returns the seconds since the matching `enter`."""
        self._turn()
        return self._since - self._open.pop()[1]


def kind_of(module: torch.nn.Module) -> str | None:
    """What a module's own time is booked on; None: on the module that calls it."""
    name = type(module).__name__
    if isinstance(module, torch.nn.Linear):
        return "linears"
    if name.endswith("Norm"):
        return "norms"
    return "attention" if name.endswith("Attention") else None


class StepClock:
    """Splits the forwards of one call to `generate`, the prefill left out."""

    def __init__(self) -> None:
        self._watch = Stopwatch()
        self._forwards = 0
        self.forward_seconds = 0.0

    @property
    def seconds(self) -> dict[str, float]:
        return dict(self._watch.seconds)

    @contextmanager
    def watching(self, model: torch.nn.Module) -> Iterator[StepClock]:
        kinds = {module: kind_of(module) for module in model.modules()} | {model: "model"}

        def enter(module: torch.nn.Module, *_: Any) -> None:
            if kind := kinds.get(module):
                self._watch.enter(kind)

        def leave(module: torch.nn.Module, *_: Any) -> None:
            if kinds.get(module):
                self._leave(whole=module is model)

        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(enter).remove)
            stack.callback(register_module_forward_hook(leave).remove)
            stack.enter_context(mock.patch.object(SlotLayer, "update", self._timed_update()))
            yield self

    def _timed_update(self) -> Callable[..., Any]:
        update = SlotLayer.update

        def timed(layer: SlotLayer, *arguments: Any, **options: Any) -> Any:
            self._watch.enter("cache")
            shown = update(layer, *arguments, **options)
            self._watch.leave()
            return shown

        return timed

    def _leave(self, whole: bool) -> None:
        seconds = self._watch.leave()
        if not whole:
            return
        self._forwards += 1
        if self._forwards == 1:
            self._watch.seconds.clear()
        else:
            self.forward_seconds += seconds


def split_of(
    model: Any, prompt: torch.Tensor, nodes: int, kernels: bool, new_tokens: int
) -> dict[str, float]:
    """One call of `generate`: milliseconds per step of each column, and rows fed per step."""
    assistant = SamAssistant(budget=nodes, reroute=kernels, trust_forward=True)
    # No end of text, and no processor that would prevent one: they cost time.
    endless = mock.patch.object(model.generation_config, "eos_token_id", None)
    with endless, StepClock().watching(model) as clock:
        model.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt[None]),
            assistant=assistant,
            do_sample=False,
            max_new_tokens=new_tokens,
        )
    stats = assistant.stats.last
    spent = stats.seconds
    seconds = clock.seconds | {name: spent[name] for name in ("walk", "draft")}
    seconds["cache"] += spent["cache"]
    seconds["inputs"] = spent["forward"] - clock.forward_seconds
    seconds["total"] = sum(seconds.values())
    split = {name: 1e3 * value / stats.steps for name, value in seconds.items()}
    return split | {"rows": 1 + stats.nodes_per_step}


def time_steps(
    table: Table,
    model: Any,
    prompt: torch.Tensor,
    nodes: int,
    arguments: argparse.Namespace,
    progress: Callable[[str], None],
) -> None:
    """A row without the kernels and one with them."""
    splits: dict[bool, list[dict[str, float]]] = {False: [], True: []}

    def call(kernels: bool) -> None:
        splits[kernels].append(split_of(model, prompt, nodes, kernels, arguments.step_tokens))

    for kernels in splits:  # the model is tested in its first call
        call(kernels)
        splits[kernels].clear()
    calls = {f"kernels {kernels}": partial(call, kernels) for kernels in splits}
    what = f"{len(prompt)} tokens, {nodes} nodes"
    alternate(calls, arguments.step_repeats, lambda text: progress(f"{what}: {text}"))
    for kernels, found in splits.items():
        figures = {name: median(split[name] for split in found) for name in found[0]}
        table.add(context=len(prompt), kernels="on" if kernels else "off", **figures)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step-contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--step-nodes", type=int, nargs="+", default=list(NODES), help="verified")
    parser.add_argument("--step-tokens", type=int, default=24, help="to generate per call")
    parser.add_argument("--step-repeats", type=int, default=5)


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    model, tokenizer = load(arguments)
    if arguments.quick:
        arguments.step_contexts, arguments.step_nodes = [64], [7]
        arguments.step_tokens, arguments.step_repeats = 8, 1
    text = real_text(tokenizer, max(arguments.step_contexts)).flatten()
    return measure(model, text, arguments, progress)


def measure(
    model: Any,
    text: torch.Tensor,
    arguments: argparse.Namespace,
    progress: Callable[[str], None],
) -> Report:
    """Every context, a prefix of `text` (int64 [tokens]), with every number of nodes."""
    names = ("model", "step_contexts", "step_nodes", "step_tokens", "step_repeats")
    report = Report("step", {name: getattr(arguments, name) for name in names})
    table = report.table(f"Where a step's time goes, {model.dtype}", COLUMNS)
    for context in arguments.step_contexts:
        for nodes in arguments.step_nodes:
            time_steps(table, model, text[:context], nodes, arguments, progress)
    return report
