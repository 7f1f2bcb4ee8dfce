"""The command `hf-retrieval-assist demo`."""

from __future__ import annotations

import argparse

from .command import Command
from .values import at_least, device, load_model, loaded


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="gemma3",
        help="gemma3 (a base model) or smollm2 (tuned for chat), from the package index; or the "
        "path or hub id of another one",
    )
    parser.add_argument("--device", type=device, help="torch device (default: a GPU, else the CPU)")
    parser.add_argument("--prompt", help="a text to answer or to go on from; default: four tasks")
    parser.add_argument(
        "--max-new-tokens", type=at_least(1), default=128, metavar="N", help="tokens after --prompt"
    )


def _run(args: argparse.Namespace) -> None:
    """Plain and assisted decoding side by side on a real model."""
    from transformers import AutoTokenizer

    from .. import demo_model
    from ..demo.comparison import TASKS, WARM_UP, Task, compare
    from ..demo.show import show
    from ..planning.cost_store import CostModels

    path = args.model
    if path in demo_model.MODELS:
        print(f"{demo_model.MODELS[path].title}; prepared once, then kept.", flush=True)
        path = str(demo_model.converted_model(path))
    model, tokenizer = load_model(path, device=args.device), loaded(AutoTokenizer, path)
    tasks = TASKS
    if args.prompt is not None:
        tasks = (Task("your prompt", args.prompt, args.max_new_tokens),)
    costs = CostModels()
    print("Warming up.\n", flush=True)
    compare(model, tokenizer, WARM_UP, costs)
    show(model, tokenizer, costs, tasks)


COMMAND = Command("plain and assisted decoding side by side on a real model", _add_arguments, _run)
