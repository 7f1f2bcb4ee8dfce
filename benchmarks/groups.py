"""Groups of samples of a prompt: whole calls beside the kernels alone and no drafts.

    python -m benchmarks groups --model smollm2 --dtype bfloat16 --output benchmarks/results

At temperature 0.7, in turn, by assistants that are new in every call, and by one that is not.
Prompts that nothing was tuned on. The memory of the process is locked. Writes `groups-NAME.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from statistics import geometric_mean

from hf_retrieval_assist import Assistant, OutputMemory, SamAssistant, reroute
from hf_retrieval_assist.policy.cost_store import CostModels

from .inputs import UNTUNED, first_of_each, load, model_name, read_prompts
from .methods import Method, assisted, tokens_per_forward
from .model import DECODINGS, KERNELS, answer, settle, take_turns
from .report import Report
from .timing import lock_memory

DECODING = "temperature 0.7"
WITHOUT = "without drafts"
REPEATS = 2
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
    parser.add_argument("--groups-prompts", type=int, default=8)
    parser.add_argument("--groups-tokens", type=int, default=64, help="to generate per sample")


def compared() -> list[Method]:
    """Ways to decode; assistants are new in every call, but for the last one."""
    costs = CostModels()
    kept = SamAssistant(costs=costs)

    def by_prompt() -> Assistant:
        """Drafts from outputs of each prompt, which are kept apart."""
        memory = OutputMemory(by_prompt=True, half_life=16)
        return SamAssistant(memory=memory, costs=costs)

    return [
        Method(KERNELS, dict, scope=reroute),
        assisted(WITHOUT, lambda: Assistant([], budget=0, costs=costs)),
        assisted("SamAssistant", lambda: SamAssistant(costs=costs)),
        assisted("memory by prompt", by_prompt),
        assisted("SamAssistant, kept", lambda: kept),
    ]


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    machine = settle(arguments, progress)
    model, tokenizer = load(arguments)
    prompts = first_of_each(read_prompts(UNTUNED), 1)
    rows, tokens, count = arguments.groups_rows, arguments.groups_tokens, arguments.groups_prompts
    if arguments.quick:
        rows, tokens, count = 2, 8, 1
    prompts = [prompts[i * len(prompts) // count] for i in range(count)]
    name = model_name(arguments)
    settings = {"model": name, "prompts": count, "new_tokens": tokens, "rows": rows}
    report = Report(f"groups-{name}", settings | {"seed": arguments.seed} | machine)
    if not arguments.quick:
        lock_memory(report)
    table = report.table("Times of groups", TIMES)
    options = {"max_new_tokens": tokens, "num_return_sequences": rows, "pad_token_id": 0}
    call = partial(answer, model, tokenizer, DECODINGS[DECODING] | options, arguments.seed)
    calls = {method.name: partial(call, method) for method in compared()}
    take_turns(prompts[:1], calls, REPEATS, progress)  # kernels and costs are measured
    turns = take_turns(prompts, calls, REPEATS, progress)
    for method in calls:
        over = {
            other: [turn.ratio(method, other) for turn in turns] for other in (KERNELS, WITHOUT)
        }
        runs = [run for turn in turns for run in turn.runs[method]]
        table.add(
            model=name,
            decoding=DECODING,
            method=method,
            kernels=geometric_mean(over[KERNELS]),
            worst=min(over[KERNELS]),
            without=geometric_mean(over[WITHOUT]),
            per_forward=tokens_per_forward(runs) / rows,
            same=f"{sum(turn.same(method, KERNELS) for turn in turns)} of {count}",
        )
    return report
