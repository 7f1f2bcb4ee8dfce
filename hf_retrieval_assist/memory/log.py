"""An append-only file of finished outputs that several processes share.

A header, then records in the order of their numbers, which only grow, so that a process knows what
it has read even after another one rewrote the file. Little-endian throughout:

    header: magic, version, crc32 of what follows, generation (new whenever the file is rewritten),
            floor (outputs with a lower number were forgotten)
    record: marker, crc32 of what follows, number, bytes of the fingerprint, tokens,
            the fingerprint (UTF-8), the token ids (uint32)
"""

from __future__ import annotations

import os
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ..system.files import locked, replacing

_MAGIC, _VERSION = b"HFRAoutM", 1
_MARKER = b"\xf5out"  # no byte of it can start a token id below 2^24
_HEADER = struct.Struct("<8sIIQQ")
_RECORD = struct.Struct("<4sIQII")
_CHECKED = 8  # bytes of a record in front of what its checksum covers
_OWNER_ONLY = 0o600


@dataclass(frozen=True)
class Record:
    """A finished output.

    Attributes:
        number: place among all outputs ever logged here.
        fingerprint: of the model that wrote it.
        token_ids: int32 [n].
    """

    number: int
    fingerprint: str
    token_ids: NDArray[np.int32]

    def encode(self) -> bytes:
        name = self.fingerprint.encode()
        head = _RECORD.pack(_MARKER, 0, self.number, len(name), len(self.token_ids))
        body = head[_CHECKED:] + name + self.token_ids.astype("<u4").tobytes()
        return _MARKER + struct.pack("<I", zlib.crc32(body)) + body


class SharedOutputs(Protocol):
    """A process's view of finished outputs that other processes read and write too."""

    @property
    def last_number(self) -> int:
        """Number of the last record read or written."""

    def read(self) -> tuple[int, list[Record]]:
        """The number below which outputs were forgotten, and records not read or written before.

        Empty once there are no more.
        """

    def append(self, fingerprint: str, token_ids: NDArray[np.int32]) -> tuple[int, list[Record]]:
        """Write an output. Returns what `read` would have returned just before."""

    def forget(self) -> int:
        """Drop all records, for every process. Returns the new floor.

        Raises:
            OSError: the others could not be told.
        """

    def sync(self, timeout: float) -> bool:
        """Wait until what was written is with the others and what they wrote can be read.

        Returns:
            Whether that was so within `timeout` seconds.
        """


class OutputLog:
    """A process's view of the file at `path`, which is created when first written to.

    Its owner alone may read it (mode 0600); a file that others could read is closed to them. Every
    access holds the lock file beside it. When `append` returns, the record is with the operating
    system: it survives the death of every process, though not a loss of power.

    Args:
        path: the file; links to it are followed now, so that all its writers hold one lock.
        keep_bytes: when the file is above twice this size, only the newest records, up to this
            size, are kept.

    Raises:
        ValueError: from any method, if the file is not such a log or of another version.
        OSError: from any method, if the file cannot be used; it names the file.
    """

    def __init__(self, path: str | os.PathLike[str], keep_bytes: int) -> None:
        self.path = Path(path).resolve()
        self.keep_bytes = keep_bytes
        self._generation = 0
        self._offset = _HEADER.size
        self._floor = 0
        self._next = 0

    @property
    def last_number(self) -> int:
        """Number of the last record read or written."""
        return self._next - 1

    def read(self) -> tuple[int, list[Record]]:
        """The floor, and the records that this view has neither read nor written before."""
        with self._locked():
            if not self._exists():
                return self._floor, []
            with self._opened("rb") as file:
                return self._floor_and_news(file)

    def append(self, fingerprint: str, token_ids: NDArray[np.int32]) -> tuple[int, list[Record]]:
        """Write an output. Returns what `read` would have returned just before."""
        with self._locked():
            if not self._exists():
                self._rewrite([], self._floor)
            with self._opened("r+b") as file:
                news = self._floor_and_news(file)
                record = Record(self._next, fingerprint, token_ids).encode()
                # What lies behind the last good record is the torn end of a killed process's.
                file.truncate(self._offset)
                file.seek(self._offset)
                file.write(record)
            self._offset += len(record)
            self._next += 1
            if self._offset > 2 * self.keep_bytes:
                # The record is in the file; whoever appends next tries again.
                with suppress(OSError):
                    self._compact()
        return news

    def forget(self) -> int:
        """Drop all records, for every process. Returns the new floor."""
        with self._locked():
            if self._exists():
                with self._opened("rb") as file:
                    self._floor_and_news(file)
            self._rewrite([], self._next)
        return self._floor

    def sync(self, timeout: float) -> bool:
        """True: whoever reads the file sees it as it is."""
        return True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with locked(Path(f"{self.path}.lock")):
                yield
        except OSError as error:
            # A write that fails does not say where.
            error.filename = error.filename or str(self.path)
            raise

    @contextmanager
    def _opened(self, mode: Literal["rb", "r+b"]) -> Iterator[BinaryIO]:
        with open(self.path, mode) as file:
            if os.name != "nt" and os.fstat(file.fileno()).st_mode & 0o077:
                os.fchmod(file.fileno(), _OWNER_ONLY)
            yield file

    def _exists(self) -> bool:
        return self.path.exists() and self.path.stat().st_size > 0

    def _floor_and_news(self, file: BinaryIO) -> tuple[int, list[Record]]:
        self._read_header(file)
        file.seek(self._offset)
        data = file.read()
        news, end, damaged = _parse(data)
        if damaged:
            warnings.warn(
                f"{self.path}: skipped {damaged} bytes that are not a whole output",
                stacklevel=4,
            )
        self._offset += end
        news = [record for record in news if record.number >= self._next]
        if news:
            self._next = news[-1].number + 1
        return self._floor, news

    def _read_header(self, file: BinaryIO) -> None:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size or header[:8] != _MAGIC:
            raise ValueError(f"{self.path}: expected a log of outputs, got another kind of file")
        _, version, checksum, generation, floor = _HEADER.unpack(header)
        if version != _VERSION:
            raise ValueError(f"{self.path}: expected version {_VERSION}, got {version}")
        if checksum != zlib.crc32(header[16:]):
            raise ValueError(f"{self.path}: the header does not match its checksum")
        if generation != self._generation:
            self._generation, self._offset = generation, _HEADER.size
        self._floor = max(self._floor, floor)
        self._next = max(self._next, self._floor)

    def _compact(self) -> None:
        records, _, _ = _parse(self.path.read_bytes()[_HEADER.size :])
        kept: list[bytes] = []
        size = 0
        for record in reversed(records):
            kept.append(record.encode())
            size += len(kept[-1])
            if size > self.keep_bytes:
                kept.pop()
                break
        self._rewrite(kept[::-1], self._floor)

    def _rewrite(self, records: list[bytes], floor: int) -> None:
        """Put a new file in the place of the old one, whole or not at all."""
        generation = int.from_bytes(os.urandom(8), "little")
        rest = struct.pack("<QQ", generation, floor)
        header = _MAGIC + struct.pack("<II", _VERSION, zlib.crc32(rest)) + rest
        with replacing(self.path, _OWNER_ONLY, alone=True) as file:
            file.write_bytes(header + b"".join(records))
        self._generation, self._floor = generation, floor
        self._offset = len(header) + sum(map(len, records))


def _parse(data: bytes) -> tuple[list[Record], int, int]:
    """The whole records in `data`, where the last one ends, and the bytes that belong to none."""
    records: list[Record] = []
    place = end = whole = 0
    while place != -1 and place < len(data):
        size = _size_of_record(data, place)
        if size:
            records.append(_decode(data[place : place + size]))
            place = end = place + size
            whole += size
        else:
            place = data.find(_MARKER, place + 1)
    return records, end, len(data) - whole


def _size_of_record(data: bytes, place: int) -> int:
    """Bytes of the record at `place`, 0 where there is none or a damaged one."""
    if len(data) - place < _RECORD.size:
        return 0
    marker, checksum, _, name, tokens = _RECORD.unpack_from(data, place)
    size: int = _RECORD.size + name + 4 * tokens
    if marker != _MARKER or size > len(data) - place:
        return 0
    body = memoryview(data)[place + _CHECKED : place + size]
    return size if zlib.crc32(body) == checksum else 0


def _decode(data: bytes) -> Record:
    _, _, number, name, _ = _RECORD.unpack_from(data)
    fingerprint = data[_RECORD.size : _RECORD.size + name].decode(errors="replace")
    tokens = np.frombuffer(data, "<u4", offset=_RECORD.size + name)
    # An id that no model has would be refused by the tree; the record's other ids are still good.
    return Record(number, fingerprint, tokens[tokens < 2**31].astype(np.int32))
