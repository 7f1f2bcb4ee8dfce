"""A real model over prompts that nothing was tuned on, and what each part brings it.

    python -m benchmarks model --model smollm2 --dtype bfloat16 --output benchmarks/results

Lines: plain `generate`; prompt lookup; both by the kernels (inside `reroute()`); the kernels with
forwards that are repeated from recordings; with copies of weights, too, which such forwards read;
and with drafts, of an assistant that is new in every call, and of one that has answered a dozen
prompts. All take turns over each prompt, with the same random numbers. A busy machine is refused.
The memory of the process is locked. Writes `model-NAME-DTYPE.json` after each way of decoding.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch
from transformers import set_seed

from hf_retrieval_assist import Assistant, SamAssistant, reroute
from hf_retrieval_assist.policy.cost_store import CostModels

from .inputs import (
    PROMPTS,
    UNTUNED,
    Prompt,
    dtype_name,
    first_of_each,
    load,
    model_name,
    read_prompts,
)
from .methods import Method, Run, assisted, prompt_lookup, run_method, tokens_per_forward
from .report import Report
from .timing import lock_memory

DECODINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "temperature 0.7": {"do_sample": True, "temperature": 0.7, "top_k": 50},
    "temperature 1": {"do_sample": True, "temperature": 1.0, "top_k": 0},
}
PLAIN, KERNELS = "plain", "kernels"
BEFORE = 12  # prompts that an assistant has answered before
QUIET = 0.5  # processes that want to run, on the average of a minute
PATIENCE = 180  # seconds for which the machine may take to become quiet

PLACE = {"model": "model", "dtype": "dtype", "decoding": "decoding"}
COLUMNS = {
    **PLACE,
    "method": "decoded by",
    "rate": "tokens/s",
    "plain": "x plain",
    "worst": "worst prompt, x plain",
    "kernels": "x kernels",
    "worst_of_kernels": "worst prompt, x kernels",
    "worst_kind": "worst kind, x kernels",
    "per_forward": "tokens/forward",
    "nodes": "nodes/forward",
    "same": "plain's text",
    "same_as_kernels": "kernels' text",
}
KINDS = {
    **PLACE,
    "kind": "kind",
    "method": "decoded by",
    "plain": "x plain",
    "kernels": "x kernels",
}


@dataclass
class Turns:
    """The runs of every method over one prompt."""

    prompt: Prompt
    runs: dict[str, list[Run]] = field(default_factory=dict)

    def rate(self, method: str) -> float:
        """Tokens per second, the median of its runs."""
        return median(run.tokens / run.seconds for run in self.runs[method])

    def ratio(self, method: str, other: str) -> float:
        return self.rate(method) / self.rate(other)

    def same(self, method: str, other: str) -> bool:
        """Whether all runs of both wrote one text."""
        first = self.runs[other][0].ids
        return all(torch.equal(run.ids, first) for run in self.runs[method])


def take_turns(
    prompts: Sequence[Prompt],
    calls: Mapping[str, Callable[[Prompt], Run]],
    repeats: int,
    progress: Callable[[str], None],
    begin: Callable[[], None] = lambda: None,
) -> list[Turns]:
    """All prompts through all methods, again and again; whose turn is first goes round.

    Args:
        calls: a run of each method.
        begin: called before every repeat.
    """
    names = list(calls)
    turns = [Turns(prompt, {name: [] for name in names}) for prompt in prompts]
    for repeat in range(repeats):
        begin()
        for number, turn in enumerate(turns):
            progress(f"run {repeat + 1} of {repeats}: prompt {number + 1} of {len(turns)}")
            first = (number + repeat) % len(names)
            for name in [*names[first:], *names[:first]]:
                turn.runs[name].append(calls[name](turn.prompt))
    return turns


def answer(
    model: Any,
    tokenizer: Any,
    options: Mapping[str, Any],
    seed: int,
    method: Method,
    prompt: Prompt,
    clocked: bool = False,
) -> Run:
    """One call for one prompt, with the random numbers of every other call."""
    set_seed(seed)
    inputs = {name: x.to(model.device) for name, x in prompt.inputs(tokenizer).items()}
    return run_method(method, model, inputs, clocked, **options)


class Compared:
    """Every method on one model, decoding in one way.

    Args:
        before: prompts that the last method's assistant has answered before a repeat.
        options: of `generate`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        before: Sequence[Prompt],
        options: dict[str, Any],
        seed: int,
    ) -> None:
        self._before = before
        self._costs = CostModels()
        self._known = SamAssistant(costs=self._costs)
        lookup = prompt_lookup()
        without = partial(Assistant, [], budget=0, costs=self._costs)
        methods = [
            Method(PLAIN, dict),
            lookup,
            Method("prompt lookup in reroute", lookup.options, 1, reroute),
            Method(KERNELS, dict, scope=reroute),
            assisted("+ recordings", partial(without, extra_memory=0)),
            assisted("+ copies", without),
            assisted("+ drafts", partial(SamAssistant, costs=self._costs)),
            assisted("+ drafts, a dozen before", lambda: self._known),
        ]
        call = partial(answer, model, tokenizer, options, seed)
        self.calls = {method.name: partial(call, method) for method in methods}

    def begin(self) -> None:
        """Let a new assistant answer the prompts before."""
        self._known = SamAssistant(costs=self._costs)
        for prompt in self._before:
            self.calls["+ drafts, a dozen before"](prompt)


def summary(turns: Sequence[Turns], method: str) -> dict[str, Any]:
    """Figures of one method; ratios are geometric means over the prompts."""
    runs = [run for turn in turns for run in turn.runs[method]]
    over = {other: [turn.ratio(method, other) for turn in turns] for other in (PLAIN, KERNELS)}
    kinds = {kind: geometric_mean(found) for kind, found in by_kind(turns, method, KERNELS)}
    same = {o: sum(turn.same(method, o) for turn in turns) for o in (PLAIN, KERNELS)}
    seconds = sum(median(run.seconds for run in turn.runs[method]) for turn in turns)
    drafted = [run.nodes for run in runs if run.nodes is not None]
    return {
        "method": method,
        "rate": sum(turn.runs[method][0].tokens for turn in turns) / seconds,
        "plain": geometric_mean(over[PLAIN]),
        "worst": min(over[PLAIN]),
        "kernels": geometric_mean(over[KERNELS]),
        "worst_of_kernels": min(over[KERNELS]),
        "worst_kind": min(kinds.values()),
        "per_forward": tokens_per_forward(runs),
        "nodes": sum(drafted) / sum(run.forwards for run in runs) if drafted else None,
        "same": f"{same[PLAIN]} of {len(turns)}",
        "same_as_kernels": f"{same[KERNELS]} of {len(turns)}",
    }


def by_kind(turns: Sequence[Turns], method: str, other: str) -> Iterator[tuple[str, list[float]]]:
    """Each kind of prompt, and the ratios of its prompts."""
    for kind in dict.fromkeys(turn.prompt.category for turn in turns):
        of_kind = [turn for turn in turns if turn.prompt.category == kind]
        yield kind, [turn.ratio(method, other) for turn in of_kind]


def fill(report: Report, place: Mapping[str, str], turns: Sequence[Turns]) -> None:
    """The rows of one way of decoding."""
    whole, kinds = report.tables[:2]
    for method in turns[0].runs:
        whole.add(**place, **summary(turns, method))
        ratios = zip(by_kind(turns, method, PLAIN), by_kind(turns, method, KERNELS), strict=True)
        for (kind, plain), (_, kernels) in ratios:
            means = {"plain": geometric_mean(plain), "kernels": geometric_mean(kernels)}
            kinds.add(**place, kind=kind, method=method, **means)


def await_quiet(patience: float, progress: Callable[[str], None]) -> None:
    """Wait until the machine has nothing else to do.

    Raises:
        SystemExit: it is still busy.
    """
    end = time.monotonic() + patience
    while (load := os.getloadavg()[0]) > QUIET:
        if time.monotonic() > end:
            raise SystemExit(
                f"model: expected a load of at most {QUIET}, got {load:.2f}; while others work, "
                "times say nothing (--anyway measures all the same)"
            )
        progress(f"the load is {load:.2f}: waiting until it is {QUIET}")
        time.sleep(5)


def settle(arguments: argparse.Namespace, progress: Callable[[str], None]) -> dict[str, Any]:
    """A quiet machine, if times are to count; what a report says of it."""
    busy = arguments.anyway or arguments.quick
    if not busy:
        await_quiet(PATIENCE, progress)
    return {"load": os.getloadavg()[0], "busy": "maybe" if busy else "no"}


def titled(title: str, progress: Callable[[str], None], text: str) -> None:
    progress(f"{title}, {text}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--decoding", nargs="+", choices=DECODINGS, default=list(DECODINGS))
    parser.add_argument("--model-prompts", type=Path, default=UNTUNED, help="folder of them")
    parser.add_argument("--model-each", type=int, default=3, help="prompts of each kind")
    parser.add_argument("--model-device", default="cpu", help="torch device")
    parser.add_argument("--model-tokens", type=int, default=48, help="to generate per prompt")
    parser.add_argument("--model-repeats", type=int, default=3)
    parser.add_argument("--anyway", action="store_true", help="though the machine is busy")


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    machine = settle(arguments, progress)
    progress("loading the model")
    model, tokenizer = load(arguments)
    model.to(arguments.model_device)
    prompts = first_of_each(read_prompts(arguments.model_prompts), arguments.model_each)
    before = sorted(read_prompts(PROMPTS), key=lambda prompt: len(prompt.text))[:BEFORE]
    tokens, repeats, decodings = arguments.model_tokens, arguments.model_repeats, arguments.decoding
    if arguments.quick:
        prompts, before, tokens, repeats = prompts[:2], before[:1], 8, 1
    place = {"model": model_name(arguments), "dtype": dtype_name(model)}
    settings = {
        **place,
        "prompts": len(prompts),
        "new_tokens": tokens,
        "repeats": repeats,
        "seed": arguments.seed,
        "before": len(before),
        **machine,
    }
    report = Report(f"model-{place['model']}-{place['dtype']}", settings)
    if not arguments.quick:
        lock_memory(report)
    report.table("Unseen prompts", COLUMNS)
    report.table("By kind of prompt", KINDS)
    for name in decodings:
        options = DECODINGS[name] | {"max_new_tokens": tokens}
        compared = Compared(model, tokenizer, before, options, arguments.seed)
        show = partial(titled, name, progress)
        take_turns(before[:1], compared.calls, 1, show)  # kernels and costs are measured
        turns = take_turns(prompts, compared.calls, repeats, show, compared.begin)
        fill(report, place | {"decoding": name}, turns)
        # A run that is cut off leaves the ways of decoding before.
        report.save(arguments.output)
    return report
