"""What the model thought likely, as drafts: one text and groups of samples, beside Token Recycling.

    python -m benchmarks groups --model smollm2 --dtype bfloat16 --output benchmarks/results

Tokens a forward and row at equal nodes, with assistants that are new for each prompt, and of groups
once more in a second epoch, after the first one has written all of them; the time of whole calls
for groups, in turn, by assistants that are new in every call, and by one that is not. Prompts that
nothing was tuned on. The memory of the process is locked. Writes `groups-NAME.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from statistics import geometric_mean, median
from typing import Any

import torch
from transformers import set_seed

from hf_retrieval_assist import Assistant, OutputMemory, SamAssistant, reroute
from hf_retrieval_assist.papers import TokenRecycling
from hf_retrieval_assist.policy.cost_store import CostModels

from .inputs import UNTUNED, Prompt, first_of_each, load, model_name, read_prompts
from .methods import Method, Run, assisted, run_method
from .model import DECODINGS, await_quiet
from .report import Report
from .timing import lock_memory, orders

FALLBACKS: dict[str, Callable[[], Any]] = {
    "Token Recycling": TokenRecycling,
    "logit n-grams": lambda: "logit_ngrams",
}
REPEATS = 2
COUNTS = {
    "model": "model",
    "decoding": "decoding",
    "rows": "rows",
    "epoch": "epoch",
    "fallback": "fallback",
    "nodes": "nodes",
    "per_forward": "tokens/forward",
}
TIMES = {
    "model": "model",
    "decoding": "decoding",
    "method": "decoded by",
    "kernels": "x kernels",
    "worst": "worst prompt",
    "without": "x without drafts",
    "per_forward": "tokens/forward",
    "same": "kernels' texts",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--groups-rows", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--groups-prompts", type=int, default=8, help="prompts, for times")
    parser.add_argument("--groups-counted", type=int, default=4, help="groups, for counts")
    parser.add_argument("--groups-tokens", type=int, default=64, help="to generate per sample")
    parser.add_argument("--groups-nodes", type=int, nargs="+", default=[4, 8, 16, 32])


class Group:
    """Calls for samples of a prompt, on one model and in one way."""

    def __init__(self, model: Any, tokenizer: Any, options: dict[str, Any]) -> None:
        self._model, self._tokenizer, self._options = model, tokenizer, options

    def call(self, method: Method, prompt: Prompt, seed: int, rows: int) -> Run:
        set_seed(seed)
        inputs = {**prompt.inputs(self._tokenizer), "pad_token_id": 0}
        return run_method(method, self._model, inputs, **self._options, num_return_sequences=rows)

    def count(
        self, make: Callable[[], Assistant], prompts: list[Prompt], rows: int, epochs: int
    ) -> Iterator[tuple[int, float]]:
        """Each epoch, and its tokens a forward and row behind the first token."""
        known = {prompt: make() for prompt in prompts}
        for epoch in range(epochs):
            accepted = steps = 0
            for number, prompt in enumerate(prompts):
                assistant = known[prompt]
                method = Method("", lambda assistant=assistant: {"assistant": assistant})  # type: ignore[misc]
                self.call(method, prompt, number + 1000 * epoch, rows)
                accepted += assistant.stats.last.accepted
                steps += assistant.stats.last.steps
            yield epoch + 1, 1 + accepted / steps


def rollouts() -> OutputMemory:
    """Outputs of each prompt, kept apart."""
    return OutputMemory(by_prompt=True, half_life=16)


def timed() -> list[Method]:
    """What whole calls are compared by; assistants are new in every call, but for the last one."""
    costs = CostModels()
    kept = SamAssistant(costs=costs)
    return [
        Method("kernels", dict, scope=reroute),
        assisted("without drafts", lambda: Assistant([], budget=0, costs=costs)),
        assisted("SamAssistant", lambda: SamAssistant(costs=costs)),
        assisted("memory by prompt", lambda: SamAssistant(memory=rollouts(), costs=costs)),
        assisted("SamAssistant, kept", lambda: kept),
    ]


def time_methods(
    group: Group, prompts: list[Prompt], rows: int, progress: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """The rows of one way of decoding."""
    methods = {method.name: method for method in timed()}
    found: dict[str, list[list[Run]]] = {name: [] for name in methods}
    for number, prompt in enumerate([prompts[0], *prompts]):  # the first ones warm up
        progress(f"times, prompt {number} of {len(prompts)}")
        runs: dict[str, list[Run]] = {name: [] for name in methods}
        for order in orders(list(methods), REPEATS):
            for name in order:
                runs[name].append(group.call(methods[name], prompt, number, rows))
        for name in methods if number else ():
            found[name].append(runs[name])
    seconds = {
        name: [median(r.seconds for r in runs) for runs in all_] for name, all_ in found.items()
    }
    for name, all_ in found.items():
        ratios = [a / b for a, b in zip(seconds["kernels"], seconds[name], strict=True)]
        without = [a / b for a, b in zip(seconds["without drafts"], seconds[name], strict=True)]
        last = [runs[-1] for runs in all_]
        equal = [
            all(torch.equal(run.ids, plain[0].ids) for run in runs)
            for runs, plain in zip(all_, found["kernels"], strict=True)
        ]
        yield {
            "method": name,
            "kernels": geometric_mean(ratios),
            "worst": min(ratios),
            "without": geometric_mean(without),
            "per_forward": sum(run.tokens for run in last)
            / rows
            / sum(run.forwards for run in last),
            "same": f"{sum(equal)} of {len(equal)}",
        }


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    if not arguments.quick:
        await_quiet(180, progress)
    model, tokenizer = load(arguments)
    prompts = first_of_each(read_prompts(UNTUNED), 1)
    rows, nodes, tokens = arguments.groups_rows, arguments.groups_nodes, arguments.groups_tokens
    counted, count, decodings = arguments.groups_counted, arguments.groups_prompts, [*DECODINGS]
    if arguments.quick:
        prompts, nodes, tokens, counted, count, rows = prompts[:1], nodes[:1], 8, 1, 1, 2
        decodings = decodings[:2]
    name = model_name(arguments)
    settings = {"new_tokens": tokens, "rows": rows, "groups": counted, "timed": count}
    report = Report(f"groups-{name}", {"model": name, "prompts": len(prompts), **settings})
    if not arguments.quick:
        lock_memory(report)
    times, counts = report.table("Times of groups", TIMES), report.table("Tokens a forward", COUNTS)
    spread = [prompts[i * len(prompts) // count] for i in range(count)]
    place = {"model": name, "decoding": decodings[1]}
    options = {**DECODINGS[decodings[1]], "max_new_tokens": tokens}
    for row in time_methods(Group(model, tokenizer, options), spread, rows, progress):
        times.add(**place, **row)
    for decoding in decodings:
        place = {"model": name, "decoding": decoding}
        group = Group(model, tokenizer, {**DECODINGS[decoding], "max_new_tokens": tokens})
        sizes = [(1, prompts, 1)]
        if decoding != "greedy":
            sizes.append((rows, [prompts[i * len(prompts) // counted] for i in range(counted)], 2))
        for size in nodes:
            for fallback, drafter in FALLBACKS.items():
                for width, texts, epochs in sizes:
                    progress(f"{decoding}, {width} rows, {size} nodes, {fallback}")

                    def make(drafter: Any = drafter, size: int = size) -> Assistant:
                        return SamAssistant(fallback=drafter(), budget=size)

                    for epoch, per_forward in group.count(make, texts, width, epochs):
                        what = {"rows": width, "epoch": epoch, "fallback": fallback}
                        counts.add(**place, **what, nodes=size, per_forward=per_forward)
        report.save(arguments.output)  # a run that is cut off leaves the ways before
    return report
