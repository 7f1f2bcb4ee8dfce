"""The same requests again, and slightly changed: what remembering earlier outputs brings.

Three passes over short prompts with Gemma-3-270M, greedy: as they are, once more, and with one word
left out of each. Assistants keep what they learnt from pass to pass; plain `generate` and the
assistants take turns over each prompt.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

import torch

from hf_retrieval_assist import Assistant, OutputMemory, SamAssistant, SuffixAssistant
from hf_retrieval_assist.demo_model import load_demo_model
from hf_retrieval_assist.planning.cost_store import CostModels

from .model import read_prompts
from .report import Report
from .timing import orders

COLUMNS = {
    "prompts": "prompts",
    "method": "method",
    "rate": "tokens/s",
    "ratio": "x plain",
    "worst": "worst x",
    "accepted": "tokens/step",
    "same": "identical",
}
WARM_UP = "One, two, three, four, five, six,"


@dataclass
class Outcome:
    """One prompt through one method.

    Attributes:
        ids: int64 [new tokens].
        seconds: of the whole call.
        steps: verification steps, each a forward after the prefill.
    """

    ids: torch.Tensor
    seconds: float
    steps: int


def changed(text: str) -> str:
    """The text without the word in its middle; spaces and lines stay as they are."""
    words = text.split(" ")
    middle = len(words) // 2
    return " ".join(words[:middle] + words[middle + 1 :])


def passes(prompts: Sequence[str]) -> dict[str, list[str]]:
    return {
        "first time": list(prompts),
        "again": list(prompts),
        "one word less": [changed(prompt) for prompt in prompts],
    }


def assistants() -> dict[str, Assistant | None]:
    """With what each method generates, the memories empty."""
    costs = CostModels()
    return {
        "plain": None,
        "SamAssistant": SamAssistant(costs=costs),
        "SamAssistant, memory": SamAssistant(memory=OutputMemory(), costs=costs),
        "SuffixAssistant": SuffixAssistant(costs=costs),
    }


def serve(
    model: Any, tokenizer: Any, prompt: str, assistant: Assistant | None, new_tokens: int
) -> Outcome:
    """Generate greedily, with an assistant or without."""
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False}
    if assistant is not None:
        options["assistant"] = assistant
    started = time.perf_counter()
    ids = model.generate(**inputs, **options)[0, inputs.input_ids.shape[1] :]
    seconds = time.perf_counter() - started
    steps = len(ids) - 1 if assistant is None else assistant.stats.last.steps
    return Outcome(ids, seconds, steps)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeated-prompts", type=int, help="how many (default: 20, quick: 3)")
    parser.add_argument("--repeated-tokens", type=int, help="to generate (default: 32, quick: 8)")


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    progress("loading the model")
    model, tokenizer = load_demo_model()
    count = arguments.repeated_prompts or (3 if arguments.quick else 20)
    new_tokens = arguments.repeated_tokens or (8 if arguments.quick else 32)
    prompts = sorted((prompt.text for prompt in read_prompts()), key=len)[:count]
    return measure(model, tokenizer, prompts, new_tokens, progress)


def measure(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    new_tokens: int,
    progress: Callable[[str], None],
) -> Report:
    """All passes, every method over each prompt in turn."""
    report = Report("repeated", {"prompts": len(prompts), "new_tokens": new_tokens})
    table = report.table("The same requests again", COLUMNS)
    methods = assistants()
    for assistant in methods.values():
        progress("warming up")
        # The measured costs stay, what was learnt has nothing to do with the prompts.
        serve(model, tokenizer, WARM_UP, assistant, new_tokens)
    for title, texts in passes(prompts).items():
        outcomes: dict[str, list[Outcome]] = {name: [] for name in methods}
        for (index, text), order in zip(
            enumerate(texts), orders(list(methods), len(texts)), strict=True
        ):
            progress(f"{title}: prompt {index + 1} of {len(texts)}")
            for name in order:
                outcomes[name].append(serve(model, tokenizer, text, methods[name], new_tokens))
        for name, done in outcomes.items():
            table.add(prompts=title, method=name, **_figures(done, outcomes["plain"]))
    return report


def _figures(done: list[Outcome], plain: list[Outcome]) -> dict[str, Any]:
    pairs = list(zip(done, plain, strict=True))
    ratios = [other.seconds / outcome.seconds for outcome, other in pairs]
    tokens = sum(len(outcome.ids) for outcome in done)
    same = sum(torch.equal(outcome.ids, other.ids) for outcome, other in pairs)
    return {
        "rate": tokens / sum(outcome.seconds for outcome in done),
        "ratio": geometric_mean(ratios),
        "worst": min(ratios),
        # An output's first token comes from its prefill and belongs to no step.
        "accepted": (tokens - len(done)) / sum(outcome.steps for outcome in done),
        "same": f"{same} of {len(done)}",
    }
