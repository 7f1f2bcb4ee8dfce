"""The command `hf-retrieval-assist demo`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .command import Command
from .values import at_least, device, load_model, loaded


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--measure", action="store_true", help="medians of several silent runs, as a table"
    )
    parser.add_argument(
        "--repeats", type=at_least(1), default=3, help="runs of each kind for --measure"
    )
    parser.add_argument("--device", type=device, default="cpu", help="torch device, e.g. cuda")
    parser.add_argument(
        "--svg", type=Path, metavar="FILE", help="record the first task as an animated picture"
    )

    parser.add_argument("--model", help="path or hub id of another model; default: Gemma-3-270M")
    parser.add_argument("--prompt", help="a text to go on from; default: four tasks")
    parser.add_argument(
        "--max-new-tokens", type=int, default=128, metavar="N", help="tokens after --prompt"
    )


def _run(args: argparse.Namespace) -> None:
    """Plain and assisted decoding side by side on a real model."""
    from transformers import AutoTokenizer

    from .. import demo_model
    from ..demo.comparison import TASKS, Task, warm_up
    from ..demo.measure import measure
    from ..demo.picture import animation
    from ..demo.show import show
    from ..planning.cost_store import CostModels

    tasks: tuple[Task, ...] = TASKS
    if args.prompt is not None:
        tasks = (Task("your prompt", "", args.max_new_tokens, text=args.prompt),)
    if args.model is None:
        print("Gemma-3-270M (base), float32; prepared once, then kept.", flush=True)
        model, tokenizer = demo_model.load_demo_model()
    else:
        model = load_model(args.model, device=args.device)
        tokenizer = loaded(AutoTokenizer, args.model)
    model.to(args.device)
    costs = CostModels()
    print("Warming up.\n", flush=True)
    warm_up(model, tokenizer, costs)
    if args.measure:
        measure(model, tokenizer, costs, args.repeats, tasks)
        return
    found = show(model, tokenizer, costs, tasks)
    if args.svg is not None:
        args.svg.write_text(animation(found[0]), encoding="utf-8")


COMMAND = Command("plain and assisted decoding side by side on a real model", _add_arguments, _run)
