"""An EAGLE-3 head for the demo model, from nothing: answers, training, and what it brings.

    python -m benchmarks.eagle_head PROMPTS WORK --epochs 4

PROMPTS is a JSON-lines file of objects with "prompt", or an .npz of recorded requests
(`prompt_tokens`, `prompt_offsets`). Gemma-3-270M answers them itself; a head is trained on all
answers but the last ones, whose prompts it then serves beside Token Recycling and plain decoding.
WORK keeps the answers, the model's features and the head; a run that was stopped goes on there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_retrieval_assist import Assistant, SamAssistant
from hf_retrieval_assist.cli.train_head import read_records
from hf_retrieval_assist.demo_model import load_demo_model
from hf_retrieval_assist.draft_models import EagleHead
from hf_retrieval_assist.draft_models.eagle import EagleDrafter
from hf_retrieval_assist.drafters.base import Drafter
from hf_retrieval_assist.drafters.token_recycling import TokenRecyclingDrafter
from hf_retrieval_assist.planning.cost_store import CostModels
from hf_retrieval_assist.training.data import Example, examples_of_prompts
from hf_retrieval_assist.training.trainer import HeadTraining, train_head

from .report import Report
from .timing import alternate

COLUMNS = {
    "drafter": "drafter",
    "budget": "nodes",
    "accepted": "tokens/step",
    "nodes": "nodes/step",
    "speed": "x plain",
    "identical": "identical",
}


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    model, tokenizer = load_demo_model()
    prompts = read_prompts(args.prompts, tokenizer, args.prompt_length)[: args.limit]
    known, held_out = prompts[: -args.held_out], prompts[-args.held_out :]
    examples = answers(model, known, args)
    training = HeadTraining(
        draft_vocab_size=args.draft_vocabulary,
        steps=args.steps,
        arguments={
            "num_train_epochs": args.epochs,
            "learning_rate": args.learning_rate,
            "per_device_train_batch_size": 4,
            "save_steps": 100,
        },
    )
    head = train_head(
        model, examples, args.work / "head", training, feature_dir=args.work / "features"
    )
    chosen = vars(args) | {"prompts": args.prompts.name, "learnt": sum(map(length, examples))}
    report = Report("eagle-head", {name: v for name, v in chosen.items() if name != "work"})
    compare(report, model, head, held_out, args)
    print(report)
    print(f"Written to {report.save(args.work)}.")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--limit", type=int, default=None, help="use the first N prompts only")
    parser.add_argument("--held-out", type=int, default=8, help="prompts of the comparison")
    parser.add_argument("--prompt-length", type=int, default=256, help="tokens kept of a prompt")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--epochs", type=float, default=4)
    parser.add_argument("--steps", type=int, default=5, help="unrolled steps of the training")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--draft-vocabulary", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def read_prompts(path: Path, tokenizer: Any, longest: int) -> list[list[int]]:
    """Token ids of the prompts, each cut to its last `longest`."""
    if path.suffix != ".npz":
        texts = [record["prompt"] for record in read_records(path)]
        return [tokenizer(text)["input_ids"][-longest:] for text in texts]
    with np.load(path, allow_pickle=False) as recorded:
        tokens, offsets = recorded["prompt_tokens"], recorded["prompt_offsets"]
    return [part[-longest:].tolist() for part in np.split(tokens, offsets[1:-1])]


def answers(model: Any, prompts: list[list[int]], args: argparse.Namespace) -> list[Example]:
    """The model's own greedy answers, generated once and kept."""
    path = args.work / "answers.npz"
    if not path.is_file():
        args.work.mkdir(parents=True, exist_ok=True)
        made = examples_of_prompts(
            prompts, model, None, args.new_tokens, do_sample=False, assistant=SamAssistant()
        )
        tokens = {str(i): example.token_ids.numpy() for i, example in enumerate(made)}
        np.savez(path, starts=np.array([example.learn_from for example in made]), **tokens)
    with np.load(path, allow_pickle=False) as kept:
        return [
            Example(torch.from_numpy(kept[str(i)]), int(start))
            for i, start in enumerate(kept["starts"])
        ]


def length(example: Example) -> int:
    return len(example.token_ids) - example.learn_from


def compare(
    report: Report,
    model: Any,
    head: EagleHead,
    prompts: list[list[int]],
    args: argparse.Namespace,
) -> None:
    """Serve the prompts with each drafter at a fixed and at the measured number of nodes."""
    costs = CostModels()
    drafters: dict[str, Callable[[], Drafter]] = {
        "EAGLE-3 head": lambda: EagleDrafter(head),
        "Token Recycling": TokenRecyclingDrafter,
    }
    assistants = {
        (name, budget): Assistant([make()], budget=budget, costs=costs)
        for name, make in drafters.items()
        for budget in (16, "auto")
    }
    runs = {("plain", ""): lambda: serve(model, prompts, None, args.new_tokens)}
    for key, assistant in assistants.items():
        runs[key] = lambda assistant=assistant: serve(model, prompts, assistant, args.new_tokens)
    named = {" ".join(map(str, key)): run for key, run in runs.items()}
    seconds, outputs = alternate(named, args.repeats, print)
    table = report.table(f"{len(prompts)} prompts the head has not seen", COLUMNS)
    for (name, budget), assistant in assistants.items():
        key, total = f"{name} {budget}", assistant.stats.total
        table.add(
            drafter=name,
            budget=str(budget),
            accepted=total.mean_accepted_tokens,
            nodes=total.nodes_per_step,
            speed=seconds["plain "] / seconds[key],
            identical="yes" if outputs[key] == outputs["plain "] else "NO",
        )


def serve(
    model: Any, prompts: list[list[int]], assistant: Assistant | None, new_tokens: int
) -> list[list[int]]:
    options = {} if assistant is None else {"assistant": assistant}
    return [
        model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=new_tokens, **options)[
            0
        ].tolist()
        for ids in prompts
    ]


if __name__ == "__main__":
    main()
