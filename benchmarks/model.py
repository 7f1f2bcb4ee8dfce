"""A real model over real prompts: Gemma-3-270M, greedy and sampled.

Prompts stand in `prompts/`, one file per category of Spec-Bench, written for a small base model.
`--model-prompts benchmarks/prompts/untuned --greedy-prompts 20` takes twenty that nothing was tuned
on.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from transformers import set_seed

from hf_retrieval_assist import SamAssistant, SuffixAssistant, reroute
from hf_retrieval_assist.demo_model import load_demo_model
from hf_retrieval_assist.planning.cost_store import CostModels

from .methods import Method, Run, assisted, baselines, run_method
from .report import Report, Table
from .timing import alternate

PROMPTS = Path(__file__).parent / "prompts"

COLUMNS = {
    "category": "category",
    "method": "method",
    "rate": "tokens/s",
    "ratio": "x plain",
    "worst": "worst x",
    "per_forward": "tokens/forward",
    "same": "identical",
}
BATCH_COLUMNS = {
    "rows": "rows",
    "method": "method",
    "rate": "tokens/s",
    "ratio": "x plain",
    "per_forward": "tokens/forward",
    "same": "identical rows",
}
COPYING = ("answer from a passage", "multi-turn", "summarise")
"""Categories whose outputs repeat much of the prompt."""

SETTINGS = ("new_tokens", "repeats", "seed", "greedy_prompts", "sampled_prompts", "batch_rows")
DECODING: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.7},
}


@dataclass(frozen=True)
class Prompt:
    category: str
    name: str
    text: str


def read_prompts(folder: Path = PROMPTS) -> list[Prompt]:
    """All prompts, by category."""
    prompts = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        prompts += [Prompt(content["category"], **item) for item in content["prompts"]]
    return prompts


def first_of_each(prompts: list[Prompt], count: int) -> list[Prompt]:
    """At most `count` prompts of every category."""
    seen: Counter[str] = Counter()
    chosen = []
    for prompt in prompts:
        seen[prompt.category] += 1
        if seen[prompt.category] <= count:
            chosen.append(prompt)
    return chosen


@dataclass
class Comparison:
    """One prompt through all methods: median seconds, and the last run of each."""

    prompt: Prompt
    seconds: dict[str, float]
    runs: dict[str, Run]

    def ratio(self, method: str) -> float:
        return self.seconds["plain"] / self.seconds[method]

    def identical(self, method: str) -> bool:
        return torch.equal(self.runs[method].ids, self.runs["plain"].ids)


def methods() -> list[Method]:
    costs = CostModels()
    return [
        *baselines(),
        Method("plain in reroute", dict, scope=reroute),
        assisted("SamAssistant", partial(SamAssistant, costs=costs)),
        assisted("SuffixAssistant", partial(SuffixAssistant, costs=costs)),
    ]


def compare(
    model: Any,
    tokenizer: Any,
    prompt: Prompt,
    candidates: Iterable[Method],
    arguments: argparse.Namespace,
    decoding: dict[str, Any],
    progress: Callable[[str], None],
) -> Comparison:
    """Alternate the methods over one prompt."""
    inputs = dict(tokenizer(prompt.text, return_tensors="pt").to(model.device))
    return Comparison(prompt, *_alternate(model, inputs, candidates, arguments, decoding, progress))


def _alternate(
    model: Any,
    inputs: dict[str, Any],
    candidates: Iterable[Method],
    arguments: argparse.Namespace,
    decoding: dict[str, Any],
    progress: Callable[[str], None],
) -> tuple[dict[str, float], dict[str, Run]]:
    """Median seconds and last run of each method; every call starts from the same seed."""
    options = decoding | {"max_new_tokens": arguments.new_tokens}

    def call(method: Method) -> Run:
        set_seed(arguments.seed)
        return run_method(method, model, inputs, **options)

    calls = {method.name: partial(call, method) for method in candidates}
    return alternate(calls, arguments.repeats, progress)


def compare_batch(
    table: Table,
    model: Any,
    tokenizer: Any,
    prompts: list[Prompt],
    candidates: Iterable[Method],
    arguments: argparse.Namespace,
    progress: Callable[[str], None],
) -> None:
    """A row per method that takes batches: prompts of different lengths in one call, greedy."""
    texts = [prompt.text for prompt in prompts]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    seconds, runs = _alternate(
        model,
        dict(inputs.to(model.device)),
        [method for method in candidates if method.max_batch is None],
        arguments,
        DECODING["greedy"],
        progress,
    )
    for method, run in runs.items():
        table.add(
            rows=len(texts),
            method=method,
            rate=run.tokens / seconds[method],
            ratio=seconds["plain"] / seconds[method],
            per_forward=run.tokens / run.forwards,
            same=f"{int((run.ids == runs['plain'].ids).all(dim=1).sum())} of {len(texts)}",
        )


def summarise(table: Table, comparisons: list[Comparison]) -> None:
    """A row per category and method; speed ratios are geometric means over the prompts."""
    for category in dict.fromkeys(c.prompt.category for c in comparisons):
        of_category = [c for c in comparisons if c.prompt.category == category]
        _summarise(table, category, of_category)
    _summarise(table, "all", comparisons)


def _summarise(table: Table, category: str, comparisons: list[Comparison]) -> None:
    for method in comparisons[0].runs:
        runs = [c.runs[method] for c in comparisons]
        ratios = [c.ratio(method) for c in comparisons]
        tokens = sum(run.tokens for run in runs)
        table.add(
            category=category,
            method=method,
            rate=tokens / sum(c.seconds[method] for c in comparisons),
            ratio=geometric_mean(ratios),
            worst=min(ratios),
            per_forward=tokens / sum(run.forwards for run in runs),
            same=f"{sum(c.identical(method) for c in comparisons)} of {len(comparisons)}",
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder or hub id (default: Gemma-3-270M)")
    parser.add_argument("--model-prompts", type=Path, default=PROMPTS, help="folder of them")
    parser.add_argument("--model-dtype", default="float32", help="of the weights")
    parser.add_argument("--model-device", default="cpu", help="torch device")
    parser.add_argument("--model-tokens", type=int, help="tokens to generate per prompt")
    parser.add_argument("--model-repeats", type=int, default=3)
    parser.add_argument("--greedy-prompts", type=int, default=1, help="of each category")
    parser.add_argument("--sampled-prompts", type=int, default=1, help="of each category")
    parser.add_argument("--batch-rows", type=int, default=8, help="prompts in the batch; 0: none")


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    progress("loading the model")
    model, tokenizer = _load(arguments.model, getattr(torch, arguments.model_dtype))
    model.to(arguments.model_device)
    arguments.new_tokens = arguments.model_tokens or (16 if arguments.quick else 32)
    arguments.repeats = 1 if arguments.quick else arguments.model_repeats
    return measure(model, tokenizer, read_prompts(arguments.model_prompts), arguments, progress)


def measure(
    model: Any,
    tokenizer: Any,
    prompts: list[Prompt],
    arguments: argparse.Namespace,
    progress: Callable[[str], None],
) -> Report:
    """Every prompt through every method, for each kind of decoding."""
    report = Report("model", {name: getattr(arguments, name) for name in SETTINGS})
    report.settings["dtype"] = str(model.dtype)
    report.settings["model"] = model.config.get_text_config().to_dict()
    candidates = methods()
    for method in candidates:
        progress(f"warming up {method.name}")
        compare(model, tokenizer, prompts[0], [method], arguments, DECODING["greedy"], _silent)
    counts = {"greedy": arguments.greedy_prompts, "sampled": arguments.sampled_prompts}
    for kind in (kind for kind, count in counts.items() if count):
        done = []
        for prompt in first_of_each(prompts, counts[kind]):
            show = _titled(f"{kind}: {prompt.category}, {prompt.name}", progress)
            done.append(
                compare(model, tokenizer, prompt, candidates, arguments, DECODING[kind], show)
            )
        summarise(report.table(f"Real model, {kind}", COLUMNS), done)
    copying = [prompt for prompt in prompts if prompt.category in COPYING][: arguments.batch_rows]
    if copying:
        table = report.table("Real model, a batch of prompts to copy from", BATCH_COLUMNS)
        show = _titled("batch", progress)
        compare_batch(table, model, tokenizer, copying, candidates, arguments, show)
    return report


def _titled(title: str, progress: Callable[[str], None]) -> Callable[[str], None]:
    return lambda text: progress(f"{title}: {text}")


def _silent(text: str) -> None:
    """Progress of what is not worth reporting."""


def _load(name: str | None, dtype: torch.dtype) -> tuple[Any, Any]:
    if name is None:
        return load_demo_model(dtype)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval()
    return model, AutoTokenizer.from_pretrained(name)
