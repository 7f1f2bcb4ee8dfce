"""The commands that build, extend and inspect a corpus on disk."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from typer import Argument, BadParameter, Option

from ...corpus.datastore import Datastore
from ...corpus.format import MANIFEST
from ...corpus.readers import load_encoder, read_texts
from ...system.arguments import byte_count
from .signals import ending_on_sigterm

_STORE = Argument(..., help="the datastore's directory")


@ending_on_sigterm(143)  # which removes what was staged
def build(
    path: Path = _STORE,
    sources: list[str] = Argument(
        ...,
        help=".txt, .py, .md, .jsonl or .parquet files, directories of them, or datasets:NAME for "
        "what the datasets library reads: a file, a folder or a Hub id",
    ),
    tokenizer: str = Option(..., help="folder or Hub id of a transformers tokenizer"),
    memory: int = Option(
        "4G", parser=byte_count, metavar="BYTES", help="for sorting, such as 750M; bounds a shard"
    ),
    workers: int = Option(1, help="shards sorted at the same time"),
    quiet: bool = Option(False, "--quiet", help="no progress bar"),
    field: str = Option("text", help="column with the text"),
    split: str = Option("train", help="split of a data set"),
    vocab_size: int | None = Option(
        None, help="rows of the model's output layer (default: from the tokenizer's folder)"
    ),
    append: bool = Option(False, "--append", help="add to an existing datastore"),
    overwrite: bool = Option(False, "--overwrite", help="replace an existing datastore"),
) -> None:
    """Index a corpus for retrieval."""
    if append and overwrite:
        raise BadParameter("--overwrite: expected no --append beside it")
    if (path / MANIFEST).is_file() and not append and not overwrite:
        raise FileExistsError(f"{path} exists; --append adds to it, --overwrite replaces it")
    encoder = load_encoder(tokenizer)
    options: dict[str, Any] = {"memory": memory, "workers": workers, "progress": not quiet}
    documents = encoder.encode_stream(read_texts(sources, field, split))
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
    name, known = store.manifest.tokenizer_name, store.manifest.tokenizer or "not recorded"
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
