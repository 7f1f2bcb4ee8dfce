"""Three tasks on a real model, with and without an assistant: `python examples/demo.py`.

The model is Gemma-3-270M (base) in float32, from the Python package index. Runs alternate between
plain and assisted decoding; speeds are medians. Every assisted run starts with a new assistant, so
that it has seen nothing but its prompt; only the measured cost of forwards is shared. The last task
samples, and both kinds of decoding start from the same seed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from hf_retrieval_assist import SamAssistant
from hf_retrieval_assist.demo_model import load_demo_model
from hf_retrieval_assist.planning.cost_store import CostModels

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Task:
    title: str
    prompt: str
    new_tokens: int
    sampling: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """What `generate` is told."""
        temperature = {"temperature": 0.8} if self.sampling else {}
        return {"max_new_tokens": self.new_tokens, "do_sample": self.sampling, **temperature}


TASKS = (
    Task("edit a Python file", "edit.txt", 320),
    Task("quote from a document", "extract.txt", 96),
    Task("open-ended text, sampled", "open.txt", 96, sampling=True),
)


@dataclass(frozen=True)
class Outcome:
    """Seconds of whole calls, prompt included, and what the last assisted call did."""

    plain: list[float]
    assisted: list[float]
    tokens: int
    mean_accepted_tokens: float
    identical: bool
    text: str

    def row(self, title: str) -> str:
        plain, assisted = statistics.median(self.plain), statistics.median(self.assisted)
        return (
            f"{title:<26}{self.tokens:>7}"
            f"{self.tokens / plain:>10.1f}{self.tokens / assisted:>11.1f}"
            f"{plain / assisted:>8.2f}x{self.mean_accepted_tokens:>13.2f}"
            f"{'yes' if self.identical else 'NO':>11}"
        )


HEADER = (
    f"{'task':<26}{'tokens':>7}{'plain/s':>10}{'assisted/s':>11}{'speedup':>9}"
    f"{'tokens/step':>13}{'identical':>11}"
)


def generate(model: Any, inputs: Any, **options: Any) -> tuple[float, Any]:
    """Seconds and token ids of one call, from the same random state every time."""
    set_seed(0)
    started = time.perf_counter()
    ids = model.generate(**inputs, **options)
    return time.perf_counter() - started, ids[0]


def run(model: Any, tokenizer: Any, task: Task, repeats: int, costs: CostModels) -> Outcome:
    prompt = (DATA / task.prompt).read_text(encoding="utf-8")
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    plain, assisted, identical = [], [], True
    for repeat in range(repeats):
        print(f"{task.title}: run {repeat + 1} of {repeats}", file=sys.stderr)
        seconds, expected = generate(model, inputs, **task.options)
        plain.append(seconds)
        assistant = SamAssistant(costs=costs)
        seconds, ids = generate(model, inputs, assistant=assistant, **task.options)
        assisted.append(seconds)
        identical &= torch.equal(expected, ids)
    new = ids[inputs.input_ids.shape[1] :]
    return Outcome(
        plain,
        assisted,
        len(new),
        assistant.stats.last.mean_accepted_tokens,
        identical,
        tokenizer.decode(new, skip_special_tokens=True),
    )


def warm_up(model: Any, tokenizer: Any, costs: CostModels) -> None:
    """Spend what only the first calls of a process cost."""
    inputs = tokenizer("One, two, three, one, two, three, one,", return_tensors="pt")
    inputs = inputs.to(model.device)
    for options in ({}, {"assistant": SamAssistant(costs=costs)}):
        generate(model, inputs, max_new_tokens=32, do_sample=False, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind per task")
    parser.add_argument("--device", default="cpu", help="torch device, e.g. cuda")
    parser.add_argument("--show", action="store_true", help="print what the model wrote")
    arguments = parser.parse_args()
    model, tokenizer = load_demo_model()
    model.to(arguments.device)
    costs = CostModels()
    warm_up(model, tokenizer, costs)
    print(HEADER)
    for task in TASKS:
        outcome = run(model, tokenizer, task, arguments.repeats, costs)
        print(outcome.row(task.title))
        if arguments.show:
            print(f"--- {outcome.text}\n---")


if __name__ == "__main__":
    main()
