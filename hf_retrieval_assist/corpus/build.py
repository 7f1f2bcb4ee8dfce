"""Building a datastore: documents to shards in bounded memory, published in one step."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from tqdm.auto import tqdm

from ..structures.suffix_array import block_sums
from ..system.arguments import require_several, whole_number
from ..system.files import named_errors, sync
from ..system.versions import of_extra
from ..types.token_tree import Ids, Int32Array, NamedIds, named_ids
from .format import (
    MANIFEST,
    MAX_BYTES,
    MAX_VOCAB,
    PARTS,
    SUMMED,
    Manifest,
    MappedShard,
    Shard,
    code_width,
    decode,
    entry_widths,
    map_shard,
    read_manifest,
    remove_unlisted,
    verify_files,
    write_manifest,
)

_BATCH = 1 << 20  # tokens that are validated and encoded at a time
_BLOCK = 1 << 18  # entries that are worked on at a time, in a processor's own cache
_NAME_DIGITS = 16  # a hash's
_SORTER = "pydivsufsort", "building a datastore needs"
_STAGING = re.compile(r"\.(.+)\.[0-9a-f]{8}\.partial", re.DOTALL)
_written: set[Path] = set()  # what this process is writing to
_MIN_SHARD = 64  # codes; with less memory than they need, every document would be cut up


@dataclass(frozen=True)
class BuildOptions:
    """How shards are built.

    Attributes:
        vocab_size: token ids lie below it.
        memory: bytes for sorting, shared by the workers; decides the size of a shard.
        workers: shards that are sorted at the same time. They are threads: the sorter, the checks
            and the checksums run outside the interpreter's lock.
        progress: show a progress bar.
    """

    vocab_size: int
    memory: int = 1 << 32
    workers: int = 1
    progress: bool = True

    def __post_init__(self) -> None:
        whole_number("vocab_size", self.vocab_size, 1, MAX_VOCAB)
        whole_number("workers", self.workers, 1)
        whole_number("memory", self.memory, _MIN_SHARD * self.workers * self.bytes_per_code)

    @property
    def bytes_per_code(self) -> int:
        """What the sorter holds: the text twice, an int32 per byte of it, the suffix array."""
        return 6 * code_width(self.vocab_size) + 4

    @property
    def shard_codes(self) -> int:
        """Codes (tokens and ends of documents) that one shard may hold."""
        in_memory = self.memory // (self.workers * self.bytes_per_code)
        return min(in_memory, MAX_BYTES // code_width(self.vocab_size))


@contextmanager
def staging_directory(path: Path) -> Iterator[Path]:
    """A new directory beside `path`, removed at the end with what is still in it.

    Until then a lock keeps other processes from writing to `path`. What killed writers of the same
    path left is removed first.

    Raises:
        BlockingIOError: another process is writing to `path`.
        OSError: what is staged cannot be written, which names `path`; or `path` cannot be locked.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.parent / f".{path.name}.{secrets.token_hex(4)}.partial"
    with _alone(path):
        sweep(path)
        _written.add(path)
        try:
            staging.mkdir()
            yield staging
        except OSError as error:
            if str(error.filename).startswith(str(staging)):  # which goes now
                raise OSError(error.errno, error.strerror, str(path)) from error
            raise
        finally:
            sweep(path)
            _written.discard(path)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """A scope in which no other process writes to `path`; BlockingIOError where one does, another
    OSError where the file system has no locks."""
    place = _lock_of(path)
    with ExitStack() as scope:
        try:
            scope.enter_context(FileLock(place, timeout=0, mode=0o600))
        except Timeout:
            raise BlockingIOError(f"{path}: another process is writing to it") from None
        except OSError as error:
            if error.filename is not None:
                raise
            how = f"{error.strerror}; build the datastore where files can be locked, and move it"
            place.unlink(missing_ok=True)
            raise OSError(error.errno, how, str(place)) from error
        try:
            yield
        finally:
            with suppress(OSError):  # Windows deletes no open file
                place.unlink()


def _lock_of(path: Path) -> Path:
    return path.parent / f".{path.name}.lock"


def _staged(folder: Path) -> Iterator[tuple[Path, Path]]:
    """The staging directories in a folder, and the path that each was made for."""
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        named = _STAGING.fullmatch(entry.name)
        if named and entry.is_dir() and not entry.is_symlink():
            yield entry, folder / named[1]


def sweep(path: Path) -> list[Path]:
    """Remove what writers to `path` have left, and return it: staging directories, and files of
    shards that are not in the datastore. No other process may be writing to `path`."""
    found = [staging for staging, target in _staged(path.parent) if target == path]
    for staging in found:
        with suppress(OSError):  # so that what still sorts writes nothing into it
            staging = staging.rename(path.parent / f".{path.name}.{secrets.token_hex(4)}.partial")
        shutil.rmtree(staging, ignore_errors=True)
    with suppress(OSError, ValueError):  # there is no datastore, or none that opens
        found += remove_unlisted(path, read_manifest(path).shards)
    return found


def sweep_own() -> None:
    """Remove what this process has staged, whose end does not wait for what it sorts."""
    for path in [*_written]:
        sweep(path)
        with suppress(OSError):
            _lock_of(path).unlink()


def abandoned(folder: Path) -> list[tuple[Path, Path]]:
    """The staging directories in a folder that no living process writes to, and the path that each
    was made for."""
    found = []
    for staging, path in _staged(folder):
        with suppress(OSError), _alone(path):
            found.append((staging, path))
    return found


def clean(folder: Path) -> list[Path]:
    """Remove what killed writers have left of a datastore, or of all that are, or were to be, in a
    folder, and return it. Those that a living process writes to stay as they are.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    folder, found = folder.resolve(), []
    paths = {path for _, path in _staged(folder)} | {m.parent for m in folder.glob(f"*/{MANIFEST}")}
    for path in [folder] if (folder / MANIFEST).is_file() else sorted(paths):
        with suppress(BlockingIOError), _alone(path):
            found += sweep(path)
    return found


def publish(staging: Path, path: Path, manifest: Manifest) -> None:
    """Make the manifest's datastore appear at `path` in one step.

    Where a datastore already stands, the new shards move in beside the old ones and the manifest is
    replaced; until then the old one is what opens.
    """
    if path.exists():
        for file in staging.iterdir():
            os.replace(file, path / file.name)
        write_manifest(path, manifest)
        remove_unlisted(path, manifest.shards)
    else:
        write_manifest(staging, manifest)
        os.rename(staging, path)
        sync(path.parent)


def build_shards(
    documents: Iterable[Ids | NamedIds],
    directory: Path,
    options: BuildOptions,
    executor: Executor | None = None,
    taken: Iterable[str] = (),
) -> tuple[Shard, ...]:
    """Write documents as indexed shards into a directory.

    Args:
        documents: sequences of token ids, named or not.
        directory: where; must be the same directory wherever the executor runs.
        options: see :class:`BuildOptions`.
        executor: where shards are sorted; None: threads of this process.
        taken: names of the shards that the datastore has already.

    Raises:
        ValueError: a document is not a flat sequence of ids below the vocabulary's size.
        TypeError: no documents, or one that is not made of integers.
        OSError: the disk is full or not writable.
        ImportError: the `corpus` extra is not installed.
    """
    require_several("documents", documents, "documents of token ids")
    of_extra(*_SORTER)  # rather than after all documents were read
    shards: list[Shard] = []
    running: deque[Future[Shard]] = deque()
    sorting: AbstractContextManager[Executor] = (
        ThreadPoolExecutor(options.workers) if executor is None else nullcontext(executor)
    )
    shown: dict[str, Any] = {"unit": "tok", "unit_scale": True, "desc": "indexing"}
    with sorting as pool, tqdm(**shown, disable=not options.progress) as bar:
        for text in _write_texts(documents, directory, options, {*taken}, bar):
            if len(running) == options.workers:
                shards.append(running.popleft().result())
            running.append(pool.submit(_index, text, directory, options.vocab_size))
            bar.set_postfix(shards=len(shards) + len(running))
        shards += [future.result() for future in running]
    return tuple(shards)


class _Piece(NamedTuple):
    """A document, or a part of one that was cut.

    Attributes:
        name: the document's, in UTF-8.
        ids: int32 [n].
        before: tokens of the document in front of these.
    """

    name: bytes
    ids: Int32Array
    before: int


class _TextFile:
    """The tokens file of a shard that is being filled, and what its documents are called."""

    def __init__(self, directory: Path, number: int) -> None:
        self.documents = self.tokens = self.name_bytes = 0
        parts = "tokens", "documents", "names"
        self._paths = {part: directory / f"{number}.{part}.filling" for part in parts}
        self._files: dict[str, Any] = {part: p.open("wb") for part, p in self._paths.items()}
        self._hash = hashlib.sha256()

    def write(self, batch: list[_Piece], vocab_size: int) -> None:
        codes = _encode([piece.ids for piece in batch], vocab_size)
        ends = np.empty((len(batch), 3), np.uint32)
        for piece, row in zip(batch, ends, strict=True):
            self.documents += 1
            self.tokens += len(piece.ids)
            self.name_bytes += len(piece.name) + 1
            row[:] = self.documents + self.tokens - 1, self.name_bytes, piece.before
        names = b"".join(piece.name + b"\n" for piece in batch)
        parts: dict[str, Any] = {"tokens": codes, "documents": ends, "names": names}
        for part, written in parts.items():
            with named_errors(self._paths[part]):
                self._files[part].write(written)
            self._hash.update(written)

    def close(self, taken: set[str]) -> Shard:
        """The shard is full; it gets its name, and is still to be indexed."""
        name = _free_name(self._hash.digest(), taken)
        for part, path in self._paths.items():
            with named_errors(path):
                self._files[part].close()
            sync(path)
            path.rename(path.with_name(f"{name}.{part}"))
        return Shard(name, self.documents, self.tokens, self.name_bytes)

    def abandon(self) -> None:
        """Leave the files, whatever was still to be written to them."""
        for file in self._files.values():
            with suppress(OSError):
                file.close()


def _free_name(digest: bytes, taken: set[str]) -> str:
    """A shard's name, from what it holds and from which names are taken; it is taken from now on.

    A datastore that is built again is the same, and equal shards of one are two.
    """
    names = (hashlib.sha256(b"%d:" % number + digest).hexdigest() for number in count())
    name = next(name[:_NAME_DIGITS] for name in names if name[:_NAME_DIGITS] not in taken)
    taken.add(name)
    return name


def _write_texts(
    documents: Iterable[Ids | NamedIds],
    directory: Path,
    options: BuildOptions,
    taken: set[str],
    bar: tqdm[Any],
) -> Iterator[Shard]:
    """Write tokens files, and yield each when it is full or the last."""
    text: _TextFile | None = None
    try:
        for batch in _batches(documents, options.shard_codes):
            tokens = sum(len(piece.ids) for piece in batch)
            if text and text.documents + text.tokens + len(batch) + tokens > options.shard_codes:
                yield text.close(taken)
                text = None
            text = text or _TextFile(directory, len(taken))
            text.write(batch, options.vocab_size)
            bar.update(tokens)
        if text:
            yield text.close(taken)
    finally:
        if text:
            text.abandon()


def _batches(documents: Iterable[Ids | NamedIds], shard_codes: int) -> Iterator[list[_Piece]]:
    """Documents in groups of a moderate size; one too long for a shard is cut. Of one that comes in
    parts, each goes on where the one before it of its name has ended."""
    batch: list[_Piece] = []
    size = before = 0
    last = b""
    for number, document in enumerate(documents):
        name, ids = named_ids(f"documents: document {number}", document)
        own = name.encode(errors="replace")
        if own != last or not own:
            last, before = own, 0
        for start in range(0, len(ids), shard_codes - 1):
            piece = ids[start : start + shard_codes - 1]
            if batch and size + len(piece) + 1 > min(_BATCH, shard_codes):
                yield batch
                batch, size = [], 0
            batch.append(_Piece(own, piece, before))
            size += len(piece) + 1
            before += len(piece)
    if batch:
        yield batch


def _encode(batch: list[Int32Array], vocab_size: int) -> NDArray[np.uint8]:
    """Documents as big-endian codes: uint8 [(tokens + documents) x width]."""
    ids = np.concatenate(batch)
    if ids.max() >= vocab_size:
        raise ValueError(f"documents: expected ids from 0 to {vocab_size - 1}, got {ids.max()}")
    codes = np.zeros(len(ids) + len(batch), dtype=">u4")
    is_id = np.ones(len(codes), np.bool_)
    is_id[np.cumsum([len(document) + 1 for document in batch]) - 1] = False
    codes[is_id] = ids + 1
    code_bytes = codes.view(np.uint8).reshape(-1, 4)
    return np.ascontiguousarray(code_bytes[:, 4 - code_width(vocab_size) :])


def without_document(
    path: Path, manifest: Manifest, name: str, directory: Path
) -> tuple[Shard, ...]:
    """The shards of the datastore at `path` without all documents of a name. Those that held one
    are written into a directory, in O(their size); what is left of others is as it was.

    Raises:
        ValueError: there is no document of this name, or a file is altered.
    """
    known = name.encode(errors="replace").decode()  # names are written so
    taken = {shard.name for shard in manifest.shards}
    kept: list[Shard] = []
    found = False
    for shard in manifest.shards:
        mapped = map_shard(path, shard, manifest.vocab_size)
        gone = np.array([mapped.name(i) == known for i in range(shard.documents)])
        found |= bool(name) and bool(gone.any())
        if not gone.any():
            kept.append(shard)
        elif not gone.all():
            verify_files(path, replace(manifest, shards=(shard,)))
            kept.append(_rewrite(shard, mapped, gone, directory, manifest.vocab_size, taken))
    if not found:
        expected = "expected the name of a document, which `info --documents` lists"
        raise ValueError(f"name: {expected}, got {name!r}")
    return tuple(kept)


def _rewrite(
    shard: Shard,
    mapped: MappedShard,
    gone: NDArray[np.bool_],
    directory: Path,
    vocab_size: int,
    taken: set[str],
) -> Shard:
    """Write a shard without some of its documents, bool [documents].

    The suffixes that are left stay in their order, which is that of their codes up to the ends of
    their documents. Where these are equal, sorting would go by the documents behind them; no lookup
    does.
    """
    stops = mapped.ends[:, :2] + np.array([1, 0])  # columns: codes, names
    starts = np.concatenate([[[0, 0]], stops[:-1]])
    lost = np.cumsum((stops - starts) * gone[:, None], axis=0)  # when each document ends
    bounds = np.stack([starts[gone], stops[gone]], axis=1).reshape(-1, 2)
    of_codes = bounds[:, 0].astype(np.uint32)
    shifts = np.append(0, lost[gone, 0]).astype(np.uint32)
    documents = mapped.ends[~gone]
    documents[:, :2] -= lost[~gone].astype(np.uint32)
    codes, suffixes, *_ = mapped.index
    parts: dict[str, NDArray[Any]] = {
        "tokens": _outside(codes.reshape(-1, code_width(vocab_size)), bounds[:, 0]),
        "documents": documents,
        "names": _outside(mapped.names, bounds[:, 1]),
    }
    ranked, end = np.empty(len(parts["tokens"]) - len(documents), np.uint32), 0
    for block in _blocks(suffixes):
        at = np.searchsorted(of_codes, block, side="right")  # odd inside what goes
        stays = at % 2 == 0
        left = block[stays] - shifts[at[stays] // 2]
        ranked[end : end + len(left)] = left
        end += len(left)
    digest = hashlib.sha256(shard.name.encode())  # so that equal names are of equal files
    for array in parts.values():
        digest.update(array.data)
    name = _free_name(digest.digest(), taken)
    for part, array in parts.items():
        _write(directory / f"{name}.{part}", array)
    text = Shard(name, len(documents), len(ranked), len(parts["names"]))
    return _index(text, directory, vocab_size, ranked)


def _outside(array: NDArray[Any], bounds: NDArray[np.int64]) -> NDArray[Any]:
    """What is outside some ranges of an array, whose starts and ends alternate and ascend."""
    edges = [0, *bounds.tolist(), len(array)]
    return np.concatenate([array[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)])


def _write(path: Path, array: NDArray[Any]) -> None:
    with named_errors(path), path.open("wb") as file:
        file.write(array.data)
    sync(path)


def _index(
    text: Shard, directory: Path, vocab_size: int, suffixes: NDArray[np.uint32] | None = None
) -> Shard:
    """Write a tokens file's suffix array, which is sorted unless it is given, its bucket table, and
    the sums of all files."""
    width = code_width(vocab_size)
    codes = np.fromfile(directory / f"{text.name}.tokens", np.uint8)
    counts = count_codes(codes, width, vocab_size)
    shift = _bucket_shift(vocab_size, text.tokens)
    if suffixes is None:
        ranks = rank_codes(codes, width, counts)
        rank_width = ranks.shape[1]
        by_bytes = of_extra(*_SORTER).divsufsort(ranks.reshape(-1))
        del ranks
        suffixes = align_suffixes(by_bytes, rank_width, text.documents)
        del by_bytes
    tables = (np.fromfile(directory / f"{text.name}.{part}", np.uint8) for part in SUMMED[3:])
    files: list[NDArray[Any]] = [codes, suffixes, bucket_starts(counts, shift), *tables]
    widths = zip(files, entry_widths(vocab_size), strict=True)
    files.append(np.concatenate([block_sums(f.view(np.uint8), width) for f, width in widths]))
    for number in (1, 2, 5):  # the others are written
        _write(directory / f"{text.name}.{PARTS[number]}", files[number])
    checksums = tuple(hashlib.sha256(file.data).hexdigest() for file in files)
    return replace(text, bucket_shift=shift, checksums=checksums)


def _blocks(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Parts of an array, what is made of one being small beside the whole."""
    return (array[start : start + _BLOCK] for start in range(0, len(array), _BLOCK))


def count_codes(codes: NDArray[np.uint8], width: int, vocab_size: int) -> NDArray[np.int64]:
    """int64 [vocab_size + 1]: how often each code stands in a text, uint8 [length x width]."""
    counts = np.zeros(vocab_size + 1, np.int64)
    for block in _blocks(codes.reshape(-1, width)):
        counts += np.bincount(decode(block), minlength=vocab_size + 1)
    return counts


def rank_codes(
    codes: NDArray[np.uint8], width: int, counts: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """A text's codes by their rank among those that occur: big-endian, uint8 [length, rank width].

    They sort as the codes do, and faster where they are narrower.
    """
    ranks = (np.cumsum(counts > 0) - 1).astype(np.uint32)
    rank_width = max(code_width(int(ranks[-1])), 1)
    found = np.empty((len(codes) // width, rank_width), np.uint8)
    for block, out in zip(_blocks(codes.reshape(-1, width)), _blocks(found), strict=True):
        of_block = ranks.take(decode(block))
        for place in reversed(range(rank_width)):
            out[:, place] = of_block  # its lowest byte
            of_block >>= 8
    return found


def align_suffixes(by_bytes: NDArray[np.int32], width: int, separators: int) -> NDArray[np.uint32]:
    """The suffix array of a text from that of its bytes, int32 [length x width].

    The suffixes of `separators` codes of 0 come first and are left out: uint32 [the others].
    """
    suffixes, end = np.empty(len(by_bytes) // width, np.uint32), 0
    for block in _blocks(by_bytes):
        places = block // width
        places = places[places * width == block]
        suffixes[end : end + len(places)] = places
        end += len(places)
    return suffixes[separators:]


def bucket_starts(counts: NDArray[np.int64], shift: int) -> NDArray[np.uint32]:
    """First rank of every bucket of suffixes, whose first code >> `shift` is equal, by how often
    each code occurs: uint32 [buckets + 1], the last entry being the number of suffixes."""
    ends = np.cumsum(counts) - counts[0]  # no suffix begins with the end of a document
    last = np.arange(1 << shift, len(counts), 1 << shift) - 1  # code of each bucket
    return np.concatenate([[0], ends[last], ends[-1:]]).astype(np.uint32)


def _bucket_shift(vocab_size: int, tokens: int) -> int:
    """The smallest shift whose table costs at most half a byte per token."""
    shift = 0
    while (vocab_size >> shift) + 2 > max(tokens // 8, 3):
        shift += 1
    return shift
