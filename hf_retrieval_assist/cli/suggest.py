"""The command `hf-retrieval-assist suggest`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .command import Command
from .values import load_model, loaded, read_records


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="path or hub id of the model")
    parser.add_argument(
        "prompts",
        type=Path,
        metavar="PROMPTS",
        help='a text file, its prompts separated by blank lines, or JSON lines with "prompt"',
    )
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, ...")
    parser.add_argument("--device", default="cpu", help="torch device, such as cuda")
    parser.add_argument(
        "--max-new-tokens", type=int, default=64, metavar="N", help="tokens of each output"
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="of every call")


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
