"""The command `hf-retrieval-assist suggest`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .command import Command
from .values import at_least, device, dtype, load_model, loaded, read_records


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="path or hub id of the model")
    parser.add_argument(
        "prompts",
        type=Path,
        metavar="PROMPTS",
        help='a text file, its prompts separated by blank lines, or JSON lines with "prompt"',
    )
    parser.add_argument("--dtype", type=dtype, default="auto", help="auto, float32, bfloat16, ...")
    parser.add_argument("--device", type=device, help="torch device (default: a GPU, else the CPU)")
    count = at_least(1)
    parser.add_argument(
        "--max-new-tokens", type=count, default=64, metavar="N", help="tokens of each output"
    )
    parser.add_argument("--repeats", type=count, default=3, metavar="N", help="of every call")


def _run(args: argparse.Namespace) -> None:
    """Measure which assistant pays for a model on these prompts."""
    prompts = [record["prompt"] for record in read_records(args.prompts, "prompt")]

    from transformers import AutoTokenizer

    from ..suggestion import suggest

    tokenizer = loaded(AutoTokenizer, args.model)
    model = load_model(args.model, args.dtype, args.device)
    counts = {"max_new_tokens": args.max_new_tokens, "repeats": args.repeats}
    print(suggest(model, prompts, tokenizer=tokenizer, **counts))


COMMAND = Command("measure which assistant pays on your prompts", _add_arguments, _run)
