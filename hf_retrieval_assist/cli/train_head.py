"""The command `hf-retrieval-assist train-head`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .command import Command
from .values import above_zero, at_least, dtype, load_model, loaded, read_records

if TYPE_CHECKING:
    from ..training.data import Example
    from ..training.trainer import HeadTraining

_DATA_HELP = (
    "a text file (.txt: texts separated by blank lines) or a JSON-lines file of objects with "
    '"text", or with "prompt", which the model then answers itself: a head drafts best what its '
    "model would write"
)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="path or hub id of the model that the head is to draft for")
    parser.add_argument("data", type=Path, metavar="DATA", help=_DATA_HELP)
    parser.add_argument("output", type=Path, help="folder for the head and its checkpoints")
    parser.add_argument(
        "--kind",
        choices=("eagle3", "mtp"),
        default="eagle3",
        help="an EAGLE-3 head or an MTP layer",
    )
    count = at_least(1)
    parser.add_argument(
        "--draft-vocabulary",
        type=count,
        default=8192,
        metavar="N",
        help="tokens that the head can draft",
    )
    parser.add_argument("--steps", type=count, default=5, metavar="N", help="unrolled steps")
    parser.add_argument(
        "--max-length", type=at_least(3), default=512, help="tokens of a piece of text"
    )
    parser.add_argument("--response-length", type=count, default=256, help="tokens of an answer")
    parser.add_argument("--temperature", type=float, default=1.0, help="of answers; 0: greedy")
    parser.add_argument("--epochs", type=above_zero, default=1.0, help="passes over the texts")
    parser.add_argument("--batch-size", type=count, default=4, help="texts of a step")
    parser.add_argument("--learning-rate", type=above_zero, default=5e-4, help="the highest one")
    parser.add_argument("--save-steps", type=count, default=500, help="steps between checkpoints")
    parser.add_argument("--features", type=Path, help="folder to keep the model's features in")
    parser.add_argument(
        "--held-out", type=at_least(0), default=8, help="texts kept for the evaluation"
    )
    parser.add_argument(
        "--dtype", type=dtype, default="auto", help="of the model: auto, float32, bfloat16, ..."
    )
    parser.add_argument("--restart", action="store_true", help="do not resume from a checkpoint")


def _run(args: argparse.Namespace) -> None:
    """Train, save, and print the mean accepted tokens on texts that were held out."""
    from transformers import AutoTokenizer

    from ..training.trainer import train_head

    records = read_records(args.data, "text", "prompt")
    tokenizer = loaded(AutoTokenizer, args.model)
    target = load_model(args.model, args.dtype)
    examples = _examples(records, target, tokenizer, args)
    held_out = examples[: min(args.held_out, len(examples) // 2)]
    head = train_head(
        target,
        examples[len(held_out) :],
        args.output,
        _training(args),
        feature_dir=args.features,
        resume=not args.restart,
    )
    print(f"Saved to {args.output}.")
    if held_out:
        print(f"Mean accepted tokens on held-out texts: {_evaluate(head, target, held_out):.2f}")


def _examples(
    records: list[dict[str, str]], target: Any, tokenizer: Any, args: argparse.Namespace
) -> list[Example]:
    from ..training.data import examples_of_prompts, examples_of_texts

    texts = [record["text"] for record in records if "text" in record]
    prompts = [record["prompt"] for record in records if "text" not in record]
    sampling = {"do_sample": args.temperature > 0}
    if args.temperature > 0:
        sampling |= {"temperature": args.temperature, "top_k": 0, "top_p": 1.0}
    answered = examples_of_prompts(prompts, target, tokenizer, args.response_length, **sampling)
    return examples_of_texts(texts, tokenizer, args.max_length) + answered


def _training(args: argparse.Namespace) -> HeadTraining:
    from ..training.trainer import HeadTraining

    return HeadTraining(
        kind=args.kind,
        draft_vocab_size=args.draft_vocabulary,
        steps=args.steps,
        max_length=args.max_length,
        arguments={
            "num_train_epochs": args.epochs,
            "per_device_train_batch_size": args.batch_size,
            "learning_rate": args.learning_rate,
            "save_steps": args.save_steps,
        },
    )


def _evaluate(head: Any, target: Any, examples: list[Example]) -> float:
    from ..presets import fallback_drafters
    from ..training.evaluation import mean_accepted_tokens

    requests = []
    for example in examples:
        split = example.learn_from or len(example.token_ids) // 2
        ids = example.token_ids.tolist()
        requests.append((ids[:split], ids[split:]))
    return mean_accepted_tokens(fallback_drafters(head)[0], target, requests)


COMMAND = Command("train an EAGLE-3 head or an MTP layer for a model", _add_arguments, _run)
