"""The files of a datastore: its manifest, its shards, and the checks on both.

A datastore is a directory with `manifest.json` and a file per shard, called by the first digits of
its SHA-256, `0123456789abcdef.shard`:

* int32 [documents + tokens], little-endian: the ids of all documents, and -1 behind each;
* int32 [tokens]: the positions of all ids, in the order of the suffixes that start there;
* JSON: for each document its name, its tokens, and how many of them stand in front of these, where
  a document came in parts.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..system.arguments import whole_number
from ..system.files import replacing, sync
from ..system.lazy import cached_property
from ..types.token_tree import Int32Array

MAGIC = "hf-retrieval-assist datastore"
VERSION = 5
MANIFEST = "manifest.json"
HOW_TO_BUILD = "Datastore.build and `hf-retrieval-assist build` make datastores"
MAX_VOCAB = 2**26  # more than any tokenizer's; tables of this many entries still fit anywhere
MAX_CODES = 2**29 - 1  # ids and ends of a shard's documents: the sorter counts bytes in 32 bits
_CHECKSUM = re.compile(r"[0-9a-f]{64}")


class Document(NamedTuple):
    """A document of a shard, or a part of one.

    Attributes:
        name: "" where it has none.
        tokens: how many it has here.
    """

    name: str
    tokens: int


@dataclass(frozen=True)
class Shard:
    """One shard as the manifest describes it.

    Attributes:
        documents, tokens: how many it holds.
        size: bytes of its file.
        sha256: of its file.
    """

    documents: int
    tokens: int
    size: int
    sha256: str

    def __post_init__(self) -> None:
        whole_number("tokens", self.tokens, 1, MAX_CODES)
        whole_number("documents", self.documents, 1, min(self.tokens, MAX_CODES - self.tokens))
        whole_number("size", self.size, self.array_bytes + 1, 2**40)
        if not isinstance(self.sha256, str) or not _CHECKSUM.fullmatch(self.sha256):
            raise ValueError(f"sha256: expected 64 hexadecimal digits, got {self.sha256!r}")

    @property
    def file_name(self) -> str:
        return f"{self.sha256[:16]}.shard"

    @property
    def array_bytes(self) -> int:
        """Bytes in front of the list of documents."""
        return 4 * (self.documents + 2 * self.tokens)


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

    def __post_init__(self) -> None:
        whole_number("vocab_size", self.vocab_size, 1, MAX_VOCAB)
        for name in ("tokenizer", "tokenizer_name"):
            if not isinstance(getattr(self, name), (str, type(None))):
                raise ValueError(f"{name}: expected a text, got {getattr(self, name)!r}")


def read_manifest(path: Path) -> Manifest:
    """The manifest of the datastore at `path`, with every number within its bounds.

    Raises:
        FileNotFoundError: there is no such directory.
        ValueError: it holds no manifest, or one that is altered, malformed or of another version.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"no datastore at {path}; {HOW_TO_BUILD}")
    if not (path / MANIFEST).is_file():
        raise ValueError(f"{path} is not a datastore: it has no {MANIFEST}")
    try:
        # A number with a point would count as a whole one below.
        found = json.loads((path / MANIFEST).read_bytes(), parse_float=str)
        return _parse_manifest(found)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path / MANIFEST}: {error}") from error


def _parse_manifest(found: Any) -> Manifest:
    if not isinstance(found, dict) or found.get("format") != MAGIC:
        raise ValueError(f"expected an object of format {MAGIC!r}, got {found!r:.80}")
    if found.get("version") != VERSION:
        raise ValueError(f"expected version {VERSION}, got {found.get('version')}; build it again")
    contents: Any = found.get("contents")
    if found.get("sha256") != _digest(contents):
        raise ValueError("expected an unaltered manifest, got one with a wrong sha256")
    shards = tuple(Shard(**shard) for shard in contents["shards"])
    if not shards:
        raise ValueError("expected at least one shard, got none")
    return Manifest(**{**contents, "shards": shards})


def _digest(contents: Any) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Replace the manifest at `path` in one step: a reader sees the old one or the new one."""
    contents = asdict(manifest)
    found = {"format": MAGIC, "version": VERSION, "sha256": _digest(contents), "contents": contents}
    with replacing(path / MANIFEST) as file:
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sync(path)


class MappedShard:
    """A shard whose file is mapped read-only.

    Attributes:
        path: its file.
        shard: as the manifest describes it.
        tokens: int32 [documents + tokens], ids, and -1 behind each document.
        suffixes: int32 [tokens].

    Raises:
        ValueError: the file is missing, no regular file, or of another size.
    """

    def __init__(self, folder: Path, shard: Shard) -> None:
        self.path, self.shard = folder / shard.file_name, shard
        if not self.path.is_file():  # nor a named pipe, which would be waited for
            raise ValueError(f"{self.path} is missing, or no file")
        with self.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != shard.size:
                raise ValueError(f"{self.path}: expected {shard.size} bytes, got {size}")
            self._bytes = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        numbers: Int32Array = np.frombuffer(self._bytes, "<i4", shard.array_bytes // 4)
        self.tokens, self.suffixes = np.split(numbers, [shard.documents + shard.tokens])

    @cached_property
    def documents(self) -> list[Document]:
        """The documents, the first that was added first; ValueError where the list is damaged."""
        try:
            found = [Document(*row) for row in json.loads(self._bytes[self.shard.array_bytes :])]
            sound = all(map(_is_document, found))
            counted = len(found), sum(document.tokens for document in found)
        except (ValueError, TypeError, RecursionError):
            sound = False
        if not sound or counted != (self.shard.documents, self.shard.tokens):
            raise ValueError(f"{self.path}: its list of documents is damaged; build it again")
        return found

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """int64 [documents + 1]: where the tokens of each document begin, and those of one more."""
        return np.cumsum([0, *(document.tokens + 1 for document in self.documents)])

    def verify(self) -> None:
        """Raise ValueError unless the file is as it was written. O(size)."""
        if hashlib.sha256(self._bytes).hexdigest() != self.shard.sha256:
            raise ValueError(f"{self.path} is altered: its SHA-256 is not the manifest's")


def _is_document(found: Document) -> bool:
    name, tokens = found
    return isinstance(name, str) and type(tokens) is int and tokens > 0
