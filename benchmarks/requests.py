"""Continuous batching: requests side by side, with drafts and without.

`generate_batch`, greedy: as many requests at a time as the configuration allows,
each prompt by a new assistant and then once more by the same one. Plain and assisted take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig

from hf_retrieval_assist import OutputMemory, SamAssistant
from hf_retrieval_assist.policy.cost_store import CostModels

from .inputs import UNTUNED, load, model_name, read_prompts
from .report import Report

COLUMNS = {
    "together": "side by side",
    "method": "method",
    "rate": "tokens/s",
    "ratio": "x plain",
    "forwards": "forwards",
    "same": "identical",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests-tokens", type=int, help="to generate (default: 32, quick: 8)")
    parser.add_argument("--requests-repeats", type=int, help="besides the first (default: 1)")
    parser.add_argument(
        "--requests-together", type=int, nargs="+", help="(default: 4 16, quick: 4)"
    )


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    quick = arguments.quick
    new_tokens = arguments.requests_tokens or (8 if quick else 32)
    repeats = arguments.requests_repeats or 1
    together = arguments.requests_together or ([4] if quick else [4, 16])
    progress("loading the model")
    model, tokenizer = load(arguments)
    asked = read_prompts(UNTUNED)[: 4 if quick else None]
    prompts = [prompt.inputs(tokenizer)["input_ids"][0].tolist() for prompt in asked]
    settings = {"prompts": len(prompts), "new_tokens": new_tokens, "repeats": repeats}
    report = Report("requests", {"model": model_name(arguments), **settings})
    table = report.table("Requests side by side", COLUMNS)
    for count in together:
        # Each comes several times where there are fewer prompts.
        inputs = [prompts[i % len(prompts)] for i in range(max(count, len(prompts)))]
        if count == 1:
            inputs = inputs[:8]
        for row in measure(model, inputs, count, new_tokens, repeats, progress):
            table.add(**row)
    return report


def measure(
    model: Any,
    inputs: Sequence[Sequence[int]],
    together: int,
    new_tokens: int,
    repeats: int,
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    """A table's rows for so many requests at a time."""
    costs = CostModels()
    seconds: dict[str, list[float]] = {}
    forwards: dict[str, int] = {}
    outputs: dict[str, list[list[int]]] = {}
    for number in range(repeats + 1):
        assistant = SamAssistant(memory=OutputMemory(), costs=costs)
        methods = {
            "plain": None,
            "plain in reroute": SamAssistant(budget=0, costs=costs),
            "SamAssistant": assistant,
            "SamAssistant, again": assistant,
        }
        for name, one in methods.items():
            progress(f"{together} side by side, run {number} of {repeats}: {name}")
            before = 0 if one is None else one.stats.total.forwards
            outputs[name], spent = generate(model, inputs, together, new_tokens, one)
            forwards[name] = 0 if one is None else one.stats.total.forwards - before
            if number:  # the first run chooses kernels and measures forwards
                seconds.setdefault(name, []).append(spent)
    tokens = sum(map(len, outputs["plain"]))
    return [
        {
            "together": together,
            "method": name,
            "rate": tokens / median(spent),
            "ratio": median(p / s for p, s in zip(seconds["plain"], spent, strict=True)),
            "forwards": forwards[name] or None,
            "same": f"{sum(map(list.__eq__, outputs[name], outputs['plain']))} of {len(inputs)}",
        }
        for name, spent in seconds.items()
    ]


def generate(
    model: Any, inputs: Sequence[Sequence[int]], together: int, new_tokens: int, assistant: Any
) -> tuple[list[list[int]], float]:
    """The outputs of all requests, and the seconds that they took."""
    config = GenerationConfig(do_sample=False, max_new_tokens=new_tokens, eos_token_id=-1)
    cache = ContinuousBatchingConfig(
        page_size=32, num_blocks=1024, max_batch_tokens=512, max_requests_per_batch=together
    )
    started = time.perf_counter()
    results = model.generate_batch(
        [list(ids) for ids in inputs],
        generation_config=config,
        continuous_batching_config=cache,
        warmup=False,
        progress_bar=False,
        assistant=assistant,
    )
    spent = time.perf_counter() - started
    return [results[name].generated_tokens for name in sorted(results, key=_number)], spent


def _number(request_id: str) -> int:
    return int(request_id.rpartition("_")[2])
