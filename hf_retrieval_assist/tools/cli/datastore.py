"""The commands that build, extend and inspect a corpus on disk."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from typer import Argument, BadParameter, Option

from ...corpus.datastore import Datastore
from ...corpus.format import MANIFEST
from ...corpus.readers import load_encoder, read_texts
from ...system.arguments import byte_count
from ...types.token_tree import NamedIds
from .signals import on_sigterm

_STORE = Argument(..., help="the datastore's directory")
_MEMORY = Option(
    "4G", parser=byte_count, metavar="BYTES", help="for sorting, such as 750M; bounds a shard"
)
_WORKERS = Option(1, help="shards sorted at the same time")
_QUIET = Option(False, "--quiet", help="no progress bar")
_SOURCES = Argument(
    ...,
    help=".txt, .py, .md, .jsonl or .parquet files, directories of them, or datasets:NAME for what "
    "the datasets library reads: a file, a folder or a Hub id",
)
_TOKENIZER = Option(..., help="folder or Hub id of a transformers tokenizer")
_VOCAB_SIZE = Option(
    None, help="rows of the model's output layer (default: from the tokenizer's folder)"
)


def _end(*_: object) -> NoReturn:
    """End as an interruption does, which removes what was staged."""
    sys.exit(143)


@on_sigterm(_end)
def build(
    path: Path = _STORE,
    sources: list[str] = _SOURCES,
    tokenizer: str = _TOKENIZER,
    memory: int = _MEMORY,
    workers: int = _WORKERS,
    quiet: bool = _QUIET,
    field: str = Option("text", help="column with the text"),
    split: str = Option("train", help="split of a data set"),
    vocab_size: int | None = _VOCAB_SIZE,
    append: bool = Option(False, "--append", help="add to an existing datastore"),
    overwrite: bool = Option(False, "--overwrite", help="replace an existing datastore"),
) -> None:
    """Index a corpus for retrieval."""
    if append and overwrite:
        raise BadParameter("--overwrite: expected no --append beside it")
    if (path / MANIFEST).is_file() and not append and not overwrite:
        raise FileExistsError(f"{path} exists; --append adds to it, --overwrite replaces it")
    encoder = load_encoder(tokenizer)
    texts = read_texts(sources, field, split)
    options: dict[str, Any] = {"memory": memory, "workers": workers, "progress": not quiet}
    documents: Iterable[NamedIds] = encoder.encode_stream(texts)
    began = time.perf_counter()
    before = Datastore.open(path, encoder.tokenizer) if append else None
    if before is not None:
        store = before.append(documents, **options)
    else:
        size = encoder.vocab_size if vocab_size is None else vocab_size
        names = {"tokenizer": encoder.tokenizer, "overwrite": overwrite}
        store = Datastore.build(documents, path, vocab_size=size, **names, **options)
    seconds = time.perf_counter() - began
    added = store.token_count - (0 if before is None else before.token_count)
    print(f"{added:,} tokens read, tokenised and indexed in {seconds:.1f} s")
    _print_summary(store)


def _print_summary(store: Datastore) -> None:
    size, tokens = store.bytes_on_disk, store.token_count
    name, fingerprint = store.manifest.tokenizer_name, store.manifest.tokenizer
    known = fingerprint or "not recorded"
    for row, value in {
        "path": store.path,
        "vocabulary": f"{store.vocab_size:,}",
        "tokenizer": f"{_printable(name)} ({known[:12]})" if name else known,
        "documents": f"{store.document_count:,}",
        "tokens": f"{tokens:,}",
        "shards": len(store.manifest.shards),
        "size": f"{size:,} bytes ({size / tokens:.2f} per token)",
    }.items():
        print(f"{row:<11} {value}")


def _printable(name: str) -> str:
    """A name of somebody else's, whose signs must not move the cursor."""
    return name if name.isprintable() else repr(name)


def info(
    path: Path = _STORE,
    documents: bool = Option(False, "--documents", help="list documents: tokens, name"),
) -> None:
    """Show what a datastore holds."""
    store = Datastore.open(path)
    _print_summary(store)
    for name, tokens in store.document_sizes().items() if documents else ():
        print(f"{tokens:>11,} {_printable(name) or '(without a name)'}")


def verify(path: Path = _STORE) -> None:
    """Check every file of a datastore."""
    Datastore.open(path).verify()
    print(f"{path}: all files are as they were built")


COMMANDS = (build, info, verify)
