"""Tokens per forward at a fixed number of nodes, over Spec-Bench's six kinds of prompt.

Counts alone: they do not depend on the machine, nor on what else it does. Every method verifies at
most as many nodes as the others.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hf_retrieval_assist import Assistant, OutputMemory, SamAssistant
from hf_retrieval_assist.papers import TokenRecycling

from .inputs import Prompt, first_of_each, load, model_name, read_prompts
from .methods import Method, Run, assisted, prompt_lookup, run_method, tokens_per_forward
from .report import Report, Table

COLUMNS = {
    "category": "category",
    "method": "method",
    "prompts": "prompts",
    "per_forward": "tokens/forward",
    "same": "identical",
}
# Spec-Bench counts MT-bench's eight kinds as one.
_KINDS = {
    "translation": "translation",
    "summarization": "summarisation",
    "qa": "question answering",
    "math_reasoning": "mathematical reasoning",
    "rag": "retrieval-augmented generation",
}


def read_questions(path: Path) -> list[Prompt]:
    """The first turns of Spec-Bench's `question.jsonl`."""
    prompts = []
    for line in path.read_text(encoding="utf-8").splitlines():
        question = json.loads(line)
        category = _KINDS.get(question["category"], "multi-turn conversation")
        asked = question["turns"][0]
        text = f"Question: {asked}\n\nAnswer:"
        prompts.append(Prompt(category, str(question["question_id"]), text, asked))
    return prompts


def methods(nodes: int) -> list[Method]:
    """What is compared, none of which has seen anything before a prompt."""
    return [
        Method("plain", dict),
        prompt_lookup(nodes),
        assisted("Token Recycling", lambda: Assistant([TokenRecycling()], budget=nodes)),
        assisted("SamAssistant", partial(SamAssistant, budget=nodes)),
        assisted("with a memory", lambda: SamAssistant(memory=OutputMemory(), budget=nodes)),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--spec-bench", type=Path, help="its question.jsonl (default: own prompts)")
    parser.add_argument("--spec-prompts", type=int, default=2, help="of each category")
    parser.add_argument("--spec-nodes", type=int, default=60, help="verified at most")
    parser.add_argument("--spec-tokens", type=int, default=48, help="to generate per prompt")


def run(arguments: argparse.Namespace, progress: Callable[[str], None]) -> Report:
    progress("loading the model")
    model, tokenizer = load(arguments)
    given = arguments.spec_bench
    prompts = read_prompts() if given is None else read_questions(given)
    count, tokens = arguments.spec_prompts, arguments.spec_tokens
    if arguments.quick:
        count, tokens = 1, 12
    report = Report(
        "spec_bench",
        {
            "model": model_name(arguments),
            "nodes": arguments.spec_nodes,
            "new_tokens": tokens,
            "prompts": "its own" if given is None else "Spec-Bench, the first of each kind",
        },
    )
    table = report.table("Spec-Bench's kinds", COLUMNS)
    chosen = first_of_each(prompts, count)
    measure(table, model, tokenizer, chosen, methods(arguments.spec_nodes), tokens, progress)
    return report


def warm_up(model: Any, candidates: Sequence[Method]) -> None:
    """Call each method once: the first call of its kind tests the model by forwards of its own."""
    ids = torch.ones((1, 4), dtype=torch.long, device=model.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for method in candidates:
        run_method(method, model, inputs, do_sample=False, max_new_tokens=4)


def measure(
    table: Table,
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    candidates: Sequence[Method],
    new_tokens: int,
    progress: Callable[[str], None],
) -> None:
    """A row per category and method, and one over all prompts."""
    warm_up(model, candidates)
    runs: dict[tuple[str, str], list[tuple[Run, bool]]] = {}
    for number, prompt in enumerate(prompts):
        inputs = prompt.inputs(tokenizer)
        plain = torch.empty(0)
        for method in candidates:
            progress(f"{number + 1} of {len(prompts)}: {prompt.category}, {method.name}")
            run = run_method(method, model, inputs, do_sample=False, max_new_tokens=new_tokens)
            if method.name == "plain":
                plain = run.ids
            same = torch.equal(run.ids, plain)
            for category in (prompt.category, "all"):
                runs.setdefault((category, method.name), []).append((run, same))
    for category in [*dict.fromkeys(prompt.category for prompt in prompts), "all"]:
        for method in candidates:
            found = runs[category, method.name]
            table.add(
                category=category,
                method=method.name,
                prompts=len(found),
                per_forward=tokens_per_forward([run for run, _ in found]),
                same=f"{sum(same for _, same in found)} of {len(found)}",
            )
