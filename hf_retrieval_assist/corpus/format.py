"""The files of a datastore: its manifest, its shards, and the checks on both.

A datastore is a directory with `manifest.json` and six files per shard, little-endian and without
headers, since the manifest says what they hold:

* `<name>.tokens`: the shard's documents as codes (token id + 1, and 0 after each document), each
  big-endian in as few bytes as the vocabulary needs;
* `<name>.suffixes`: uint32 positions of all ids, in the order of the suffixes starting there;
* `<name>.starts`: uint32, where in that order the suffixes of each range of first codes begin;
* `<name>.documents`: uint32 [documents, 3], where each document's codes end, and its name, and how
  many tokens of it stand in documents before it, into which it was cut;
* `<name>.names`: the documents' names in UTF-8, a line feed behind each;
* `<name>.sums`: uint64, the checksum of every block of `BLOCK_ENTRIES` entries of these files, in
  their order.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..structures.suffix_array import BLOCK_ENTRIES, block_sums, damage
from ..system.files import replacing, sync
from ..system.lazy import cached_property

MAGIC = "hf-retrieval-assist datastore"
VERSION = 3
MANIFEST = "manifest.json"
HOW_TO_BUILD = "Datastore.build and `hf-retrieval-assist build` make datastores"
SUMMED = ("tokens", "suffixes", "starts", "documents", "names")
PARTS = (*SUMMED, "sums")
MAX_VOCAB = 2**26  # more than any tokenizer's; tables of this many entries still fit anywhere
MAX_BYTES = 2**31 - 1  # a shard's tokens: the sorter counts bytes in 32 bits
_SHARD_NAME = re.compile(r"[0-9a-f]{16}")
_CHECKSUM = re.compile(r"[0-9a-f]{64}")


def code_width(vocab_size: int) -> int:
    """Bytes that hold the codes 0 .. `vocab_size`."""
    return (vocab_size.bit_length() + 7) // 8


def entry_widths(vocab_size: int) -> tuple[int, ...]:
    """Bytes of an entry of each file, in the order of `SUMMED`."""
    return (code_width(vocab_size), 4, 4, 12, 1)


def decode(code_bytes: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Codes, uint32 [length], from their big-endian bytes, uint8 [length, width]."""
    codes = np.zeros(len(code_bytes), np.uint32)
    for column in code_bytes.T:
        codes <<= 8
        codes |= column
    return codes


@dataclass(frozen=True)
class Shard:
    """One shard as the manifest describes it.

    Attributes:
        name: 16 hexadecimal digits, the stem of its files.
        documents, tokens: how many it holds.
        name_bytes: the size of its names.
        bucket_shift: log2 of the codes that share an entry of `starts`.
        checksums: SHA-256 of each file, in the order of `PARTS`; none before it is indexed.
    """

    name: str
    documents: int
    tokens: int
    name_bytes: int
    bucket_shift: int = 0
    checksums: tuple[str, ...] = ()

    def files(self) -> list[str]:
        return [f"{self.name}.{part}" for part in PARTS]

    def entries(self, vocab_size: int) -> list[int]:
        """How many each file has, in the order of `SUMMED`."""
        codes, buckets = self.documents + self.tokens, (vocab_size >> self.bucket_shift) + 1
        return [codes, self.tokens, buckets + 1, self.documents, self.name_bytes]

    def sizes(self, vocab_size: int) -> list[int]:
        """Bytes of each file, in the order of `PARTS`."""
        entries = self.entries(vocab_size)
        widths = entry_widths(vocab_size)
        blocks = sum(-(-number // BLOCK_ENTRIES) for number in entries)
        return [*(n * width for n, width in zip(entries, widths, strict=True)), 8 * blocks]


@dataclass(frozen=True)
class Manifest:
    """What a datastore holds.

    Attributes:
        vocab_size: ids lie below it.
        tokenizer: fingerprint of the tokenizer that made the ids, or None.
        tokenizer_name: what people call it, or None.
        shards: in the order in which they were added.
    """

    vocab_size: int
    tokenizer: str | None
    tokenizer_name: str | None
    shards: tuple[Shard, ...]


def _expect(condition: object, expected: str, got: object) -> None:
    if not condition:
        raise ValueError(f"expected {expected}, got {got!r}")


_SHARD = {
    **{"name": str, "documents": int, "tokens": int, "name_bytes": int},
    **{"bucket_shift": int, "checksums": list},
}
_MANIFEST = {
    **{"vocab_size": int, "tokenizer": (str, type(None))},
    **{"tokenizer_name": (str, type(None)), "shards": list},
}


def _fields(values: Any, types: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object with exactly these fields, each of its type."""
    _expect(isinstance(values, dict), f"an object of {', '.join(types)}", values)
    _expect(values.keys() == types.keys(), f"the fields {', '.join(types)}", [*values])
    for name, expected in types.items():
        valid = isinstance(values[name], expected) and not isinstance(values[name], bool)
        _expect(valid, f"{name} of type {expected}", values[name])
    return dict(values)


def _parse_shard(values: Any, vocab_size: int) -> Shard:
    """The shard of a JSON object; ValueError for a description that no shard can have."""
    fields = _fields(values, _SHARD)
    shard = Shard(**fields | {"checksums": tuple(fields["checksums"])})
    _expect(_SHARD_NAME.fullmatch(shard.name), "a shard name of 16 hexadecimal digits", shard.name)
    _expect(0 < shard.documents <= shard.tokens, "1 to `tokens` documents", shard.documents)
    named = shard.documents <= shard.name_bytes <= MAX_BYTES
    _expect(named, f"a byte of names for each document, {MAX_BYTES} at most", shard.name_bytes)
    _expect(0 <= shard.bucket_shift <= 30, "a bucket_shift of 0 to 30", shard.bucket_shift)
    # The lengths bound every position, so an index of any larger shard would overflow.
    _expect(shard.sizes(vocab_size)[0] <= MAX_BYTES, f"at most {MAX_BYTES} bytes", shard.tokens)
    _expect(len(shard.checksums) == len(PARTS), f"{len(PARTS)} checksums", shard.checksums)
    for checksum in shard.checksums:
        valid = isinstance(checksum, str) and _CHECKSUM.fullmatch(checksum)
        _expect(valid, "SHA-256 digests", checksum)
    return shard


def _digest(contents: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def read_manifest(path: Path) -> Manifest:
    """The manifest of the datastore at `path`, with every number within its bounds.

    Raises:
        FileNotFoundError: there is no such directory.
        ValueError: it holds no manifest, or one that is altered, malformed or of a newer format.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"no datastore at {path}; {HOW_TO_BUILD}")
    if not (path / MANIFEST).is_file():
        raise ValueError(f"{path} is not a datastore: it has no {MANIFEST}")
    try:
        return _parse_manifest((path / MANIFEST).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path / MANIFEST}: {error}") from error


def _parse_manifest(data: bytes) -> Manifest:
    envelope = json.loads(data)
    _expect(isinstance(envelope, dict), "an object", type(envelope).__name__)
    _expect(envelope.get("format") == MAGIC, f"format {MAGIC!r}", envelope.get("format"))
    known, found = f"version {VERSION}", envelope.get("version")
    older = isinstance(found, int) and found < VERSION
    _expect(found == VERSION, f"{known} (build it anew)" if older else known, found)
    contents = envelope.get("contents")
    values = _fields(contents, _MANIFEST)
    size = values["vocab_size"]
    _expect(0 < size <= MAX_VOCAB, f"1 to {MAX_VOCAB} ids", size)
    shards = tuple(_parse_shard(shard, size) for shard in values["shards"])
    _expect(shards, "at least one shard", "none")
    _expect(len({shard.name for shard in shards}) == len(shards), "distinct shards", "equal names")
    _expect(envelope.get("sha256") == _digest(contents), "an unaltered manifest", "a wrong sha256")
    return Manifest(**values | {"shards": shards})


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Replace the manifest at `path` in one step: a reader sees the old one or the new one."""
    contents = asdict(manifest)
    header = {"format": MAGIC, "version": VERSION, "sha256": _digest(contents)}
    envelope = {**header, "contents": contents}
    with replacing(path / MANIFEST, alone=True) as file:
        file.write_text(json.dumps(envelope, indent=1) + "\n", encoding="utf-8")
    sync(path)


@dataclass(frozen=True)
class MappedShard:
    """A shard's files, mapped read-only.

    Attributes:
        path: theirs, without the endings.
        index: as a `SuffixArray` takes it: uint8 codes, uint32 suffixes, uint32 starts, and the
            bucket shift.
        sums: uint64, see the module's docstring.
    """

    path: Path
    index: tuple[Any, ...]
    sums: NDArray[np.uint64]
    _documents: NDArray[np.uint32]
    _names: NDArray[np.uint8]

    @cached_property
    def ends(self) -> NDArray[np.uint32]:
        """uint32 [documents, 3]; ValueError where a block of the file is damaged."""
        return self._sound("documents", self._documents).reshape(-1, 3)

    @cached_property
    def names(self) -> NDArray[np.uint8]:
        """ValueError where a block of the file is damaged."""
        return self._sound("names", self._names)

    def _sound(self, part: str, array: NDArray[Any]) -> NDArray[Any]:
        """One of the last two files, whose blocks are as they were written."""
        found = block_sums(array.view(np.uint8), 12 if part == "documents" else 1)
        end = len(self.sums)
        if part == "documents":
            end -= -(-len(self._names) // BLOCK_ENTRIES)
        altered = np.flatnonzero(found != self.sums[end - len(found) : end])
        if len(altered):
            raise damage(f"{self.path}.{part}", altered[0])
        return array

    def name(self, number: int) -> str:
        """A document's; of altered files, anything."""
        start = 0 if number == 0 else int(self.ends[number - 1, 1])
        return (
            self.names[start : max(start, int(self.ends[number, 1]) - 1)]
            .tobytes()
            .decode(errors="replace")
        )


def map_shard(path: Path, shard: Shard, vocab_size: int) -> MappedShard:
    """Map the files of a shard.

    Raises:
        ValueError: a file is missing or has another size than the manifest implies.
    """
    dtypes = (np.uint8, np.uint32, np.uint32, np.uint32, np.uint8, np.uint64)
    files = zip(shard.files(), shard.sizes(vocab_size), dtypes, strict=True)
    arrays = (np.frombuffer(_map_file(path / name, size), dtype) for name, size, dtype in files)
    codes, suffixes, starts, documents, names, sums = arrays
    index = codes, suffixes, starts, shard.bucket_shift
    return MappedShard(path / shard.name, index, sums, documents, names)


def _map_file(path: Path, size: int) -> mmap.mmap:
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ValueError(f"{path}: expected a regular file")
            if found.st_size != size:
                raise ValueError(f"{path}: expected {size} bytes, got {found.st_size}")
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing") from error


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting for the writer of a named pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def verify_files(path: Path, manifest: Manifest) -> None:
    """Raise ValueError naming the first file whose size or checksum is not the manifest's."""
    for shard in manifest.shards:
        sizes = shard.sizes(manifest.vocab_size)
        for name, size, expected in zip(shard.files(), sizes, shard.checksums, strict=True):
            if hashlib.sha256(_map_file(path / name, size)).hexdigest() != expected:
                raise ValueError(f"{path / name} is altered: its SHA-256 is not the manifest's")


def remove_unlisted(path: Path, shards: Iterable[Shard]) -> list[Path]:
    """Delete shard files that no manifest names any more, and manifests that were not finished, and
    return them; no other process writes to the datastore."""
    listed = {name for shard in shards for name in shard.files()}
    files = (file for part in PARTS for file in sorted(path.glob(f"*.{part}")))
    gone = [file for file in files if file.name not in listed and _SHARD_NAME.fullmatch(file.stem)]
    gone += sorted(path.glob(f".{MANIFEST}.*.new"))
    for file in gone:
        # Windows keeps a file that a reader has mapped; the next writer tries again.
        with suppress(PermissionError):
            file.unlink()
    return gone
