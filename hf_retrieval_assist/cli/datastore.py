"""The commands that build, inspect and mend a corpus on disk."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..corpus.build import Ids
from ..corpus.cluster import RayExecutor
from ..corpus.datastore import Datastore
from ..corpus.readers import Skipped, load_encoder, read_texts
from ..system.arguments import byte_count
from .command import Command


def _bytes(text: str) -> int:
    try:
        return byte_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_sorting_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, help="the datastore's directory")
    parser.add_argument(
        "--memory",
        type=_bytes,
        default="4G",
        help="bytes for sorting, such as 750M; decides the size of a shard",
    )
    parser.add_argument("--workers", type=int, default=1, help="shards sorted at the same time")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _sorting_options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "memory": arguments.memory,
        "workers": arguments.workers,
        "progress": not arguments.quiet,
    }


def _add_build_arguments(parser: argparse.ArgumentParser) -> None:
    _add_sorting_arguments(parser)
    parser.add_argument(
        "sources",
        nargs="+",
        help=".txt, .py, .md, .jsonl or .parquet files, directories of them, or datasets:NAME for "
        "one on the Hub or in a local folder",
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        help="folder or Hub id of a transformers tokenizer, or a SentencePiece .model file",
    )
    parser.add_argument("--field", default="text", help="column with the text")
    parser.add_argument("--split", default="train", help="split of a data set")
    parser.add_argument(
        "--vocab-size",
        type=int,
        help="rows of the model's output layer (default: from the tokenizer's folder)",
    )
    parser.add_argument(
        "--skip-bad", action="store_true", help="pass over rows and files that cannot be read"
    )
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="tokenise and sort on a Ray cluster whose machines all see these paths: auto, local, "
        "or host:port",
    )
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--append", action="store_true", help="add to an existing datastore")
    existing.add_argument("--overwrite", action="store_true", help="replace an existing datastore")


def _build(arguments: argparse.Namespace) -> None:
    encoder = load_encoder(arguments.tokenizer)
    skipped = Skipped()
    texts = read_texts(
        arguments.sources, arguments.field, arguments.split, arguments.skip_bad, skipped
    )
    options = _sorting_options(arguments)
    documents: Iterable[Ids] = encoder.encode_stream(texts)
    if arguments.ray is not None:
        cluster = options["executor"] = RayExecutor(arguments.ray)
        documents = cluster.encode_stream(arguments.tokenizer, texts)
    given = arguments.vocab_size
    began = time.perf_counter()
    if arguments.append:
        datastore = Datastore.open(arguments.path, encoder.tokenizer)
        before = datastore.token_count
        datastore = datastore.append(documents, **options)
    else:
        before = 0
        datastore = Datastore.build(
            documents,
            arguments.path,
            vocab_size=encoder.vocab_size if given is None else given,
            tokenizer=encoder.tokenizer,
            overwrite=arguments.overwrite,
            **options,
        )
    seconds = time.perf_counter() - began
    added = datastore.token_count - before
    print(f"{added:,} tokens read, tokenised and indexed in {seconds:.1f} s")
    if skipped.blank:
        print(f"{skipped.blank:,} blank lines skipped")
    if skipped.bad:
        print(f"{skipped.bad:,} bad rows or files skipped, such as {skipped.example}")
    _print_summary(datastore)


def _print_summary(datastore: Datastore) -> None:
    size = datastore.bytes_on_disk
    per_token = size / datastore.token_count
    rows = {
        "path": datastore.path,
        "vocabulary": f"{datastore.vocab_size:,}",
        "tokenizer": datastore.manifest.tokenizer or "not recorded",
        "documents": f"{datastore.document_count:,}",
        "tokens": f"{datastore.token_count:,}",
        "shards": len(datastore.manifest.shards),
        "size": f"{size:,} bytes ({per_token:.2f} per token)",
    }
    for name, value in rows.items():
        print(f"{name:<11} {value}")


def _add_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, help="the datastore's directory")


def _info(arguments: argparse.Namespace) -> None:
    _print_summary(Datastore.open(arguments.path))


def _verify(arguments: argparse.Namespace) -> None:
    Datastore.open(arguments.path).verify()
    print(f"{arguments.path}: all files are as they were built")


def _compact(arguments: argparse.Namespace) -> None:
    _print_summary(Datastore.open(arguments.path).compact(**_sorting_options(arguments)))


COMMANDS = {
    "build": Command("index a corpus for retrieval", _add_build_arguments, _build),
    "info": Command("show what a datastore holds", _add_path, _info),
    "verify": Command("check every file of a datastore", _add_path, _verify),
    "compact": Command("merge the shards of a datastore", _add_sorting_arguments, _compact),
}
