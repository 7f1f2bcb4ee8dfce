"""Building shards: documents to sorted suffixes, in bounded memory."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from ..system.arguments import require_several, whole_number
from ..system.files import named_errors, sync
from ..system.versions import of_extra
from ..types.token_tree import Ids, Int32Array, NamedIds, named_ids
from .format import MAX_CODES, MAX_VOCAB, Document, Manifest, Shard, write_manifest

_SORTER = "pydivsufsort", "building a datastore needs"
_SORTED_BYTES = 28  # a token's share of memory: five for each byte of its rank, its id, its place
_WAITING_BYTES = 4  # the same of the shard that is read meanwhile
_MIN_SHARD = 64  # tokens; with less memory than they need, every document would be cut up
_BLOCK = 1 << 18  # numbers that are worked on at a time, in a processor's own cache
_SHARD_FILE = re.compile(r"[0-9a-f]{16}\.[a-z]+")
_END = np.array([-1], np.int32)  # stands behind every document


@dataclass(frozen=True)
class BuildOptions:
    """How shards are built.

    Attributes:
        vocab_size: token ids lie below it.
        memory: bytes for sorting, shared by the workers; decides the size of a shard.
        workers: shards that are sorted at the same time. They are threads: the sorter and the
            checksum run outside the interpreter's lock.
        progress: show a progress bar.
        executor: where shards are sorted; None: threads of this process.
    """

    vocab_size: int
    memory: int = 1 << 32
    workers: int = 1
    progress: bool = True
    executor: Executor | None = None

    def __post_init__(self) -> None:
        whole_number("vocab_size", self.vocab_size, 1, MAX_VOCAB)
        whole_number("workers", self.workers, 1)
        whole_number("memory", self.memory, _MIN_SHARD * self._bytes_per_code)

    @property
    def _bytes_per_code(self) -> int:
        return self.workers * _SORTED_BYTES + _WAITING_BYTES

    @property
    def shard_codes(self) -> int:
        """Ids and ends of documents that one shard may hold."""
        return min(self.memory // self._bytes_per_code, MAX_CODES)


@contextmanager
def staging_directory(path: Path) -> Iterator[Path]:
    """A new directory beside `path`, removed at the end with what is still in it.

    Raises:
        OSError: what is staged cannot be written, which names `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.parent / f".{path.name}.{secrets.token_hex(4)}.partial"
    try:
        staging.mkdir()
        yield staging
    except OSError as error:
        if str(error.filename).startswith(str(staging)):  # which goes now
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@dataclass(frozen=True)
class StagedShard:
    """A shard and its file, which is still to be moved into the datastore."""

    file: Path
    shard: Shard


def publish(staged: Iterable[StagedShard], path: Path, manifest: Manifest) -> None:
    """Move shards into the datastore at `path`, which then is what the manifest says.

    Until the manifest is replaced, the old datastore is what opens.
    """
    path.mkdir(exist_ok=True)
    for one in staged:
        os.replace(one.file, path / one.shard.file_name)
    write_manifest(path, manifest)
    sync(path.parent)


def remove_others(path: Path, shards: Iterable[Shard]) -> None:
    """Delete the files of all other shards, of this version or an earlier one."""
    kept = {shard.file_name for shard in shards}
    for file in path.iterdir():
        if _SHARD_FILE.fullmatch(file.name) and file.name not in kept:
            with suppress(PermissionError):  # Windows keeps a file that a reader has mapped
                file.unlink()


def build_shards(
    documents: Iterable[Ids | NamedIds], directory: Path, options: BuildOptions
) -> list[StagedShard]:
    """Write documents as indexed shards into a directory.

    Args:
        documents: sequences of token ids, named or not.
        directory: where; must be the same directory wherever the executor runs.
        options: see :class:`BuildOptions`.

    Raises:
        ValueError: no tokens, or a document that is no flat sequence of ids of the vocabulary.
        TypeError: no documents, or one that is not made of integers.
        OSError: the disk is full or not writable.
        ImportError: the `corpus` extra is not installed.
    """
    require_several("documents", documents, "documents of token ids")
    of_extra(*_SORTER)  # rather than after all documents were read
    staged: list[StagedShard] = []
    running: deque[Future[StagedShard]] = deque()
    sorting: AbstractContextManager[Executor] = (
        nullcontext(options.executor) if options.executor else ThreadPoolExecutor(options.workers)
    )
    shown: dict[str, Any] = {"unit": "tok", "unit_scale": True, "desc": "indexing"}
    with sorting as pool, tqdm(**shown, disable=not options.progress) as bar:
        for number, pieces in enumerate(_shards(documents, options, bar)):
            if len(running) == options.workers:
                staged.append(running.popleft().result())
            file = directory / f"{number}"
            listed = _write_tokens(file, pieces)
            pieces.clear()  # their memory is the sorter's
            running.append(pool.submit(index_shard, file, listed, options.vocab_size))
            bar.set_postfix(shards=number + 1)
        staged += [future.result() for future in running]
    if not staged:
        raise ValueError("documents: expected at least one token, got an empty corpus")
    return staged


_Piece = tuple[Document, Int32Array]


def _shards(
    documents: Iterable[Ids | NamedIds], options: BuildOptions, bar: tqdm[Any]
) -> Iterator[list[_Piece]]:
    """The documents of each shard. One too long for a shard is cut."""
    pieces: list[_Piece] = []
    most = options.shard_codes
    room = most
    for number, document in enumerate(documents):
        name, ids = named_ids(f"documents: document {number}", document, options.vocab_size)
        for start in range(0, len(ids), most - 1):
            piece = ids[start : start + most - 1]
            if len(piece) >= room:
                yield pieces
                pieces, room = [], most
            pieces.append((Document(str(name), len(piece)), piece))
            room -= len(piece) + 1
            bar.update(len(piece))
    if pieces:
        yield pieces


def _write_tokens(file: Path, pieces: list[_Piece]) -> list[Document]:
    """Write the first part of a shard's file."""
    with named_errors(file), file.open("wb") as written:
        for _, ids in pieces:
            written.write(ids.data)
            written.write(_END.data)
    sync(file)
    return [document for document, _ in pieces]


def index_shard(file: Path, documents: list[Document], vocab_size: int) -> StagedShard:
    """Write the other parts behind the tokens; where it was killed, it may run again."""
    count = sum(document.tokens for document in documents)
    tokens = np.fromfile(file, "<i4", count + len(documents))
    suffixes = sorted_suffixes(tokens, vocab_size)[len(documents) :]
    with named_errors(file), file.open("r+b") as written:
        written.seek(tokens.nbytes)
        written.write(suffixes.data)
        written.write(json.dumps(documents).encode())
        written.truncate()
    sync(file)
    with file.open("rb") as read:
        checksum = hashlib.file_digest(read, "sha256").hexdigest()
    size = file.stat().st_size
    return StagedShard(file, Shard(len(documents), count, size, checksum))


def sorted_suffixes(tokens: Int32Array, vocab_size: int) -> Int32Array:
    """The suffix array of a text, int32 [its length]; the suffixes of its -1 are the first.

    Ids are sorted by their rank among those that occur, in as few bytes as that needs.
    """
    occurs = np.zeros(vocab_size + 1, np.bool_)
    occurs[tokens + 1] = True
    ranks = np.cumsum(occurs, dtype=np.uint32) - np.uint32(1)
    width = max(int(ranks[-1]).bit_length() + 7, 8) // 8
    text = ranks[tokens + 1].astype(">u4").view(np.uint8).reshape(-1, 4)[:, 4 - width :]
    by_bytes = of_extra(*_SORTER).divsufsort(text.reshape(-1))
    del text
    blocks = (by_bytes[start : start + _BLOCK] for start in range(0, len(by_bytes), _BLOCK))
    return np.concatenate([block[block % width == 0] // width for block in blocks])
