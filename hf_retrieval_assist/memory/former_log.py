"""Logs of outputs as versions before 0.2 wrote them, which are moved over once.

A header, then records, little-endian throughout:

    header: magic, version, crc32 of what follows, generation, floor
    record: marker, crc32 of what follows, number, bytes of the fingerprint, tokens,
            the fingerprint (UTF-8), the token ids (uint32)
"""

from __future__ import annotations

import stat
import struct
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_MAGIC, _VERSION = b"HFRAoutM", 1
_MARKER = b"\xf5out"
_HEADER = struct.Struct("<8sIIQQ")
_RECORD = struct.Struct("<4sIQII")
_CHECKED = 8  # bytes of a record in front of what its checksum covers


def is_former_log(path: Path) -> bool:
    """Whether a file begins as these logs do."""
    # A named pipe would have to be waited for.
    if not path.exists() or not stat.S_ISREG(path.stat().st_mode):
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def former_outputs(path: Path, largest: int) -> Iterator[tuple[str, NDArray[np.int32]]]:
    """Fingerprint and token ids of every output in front of the first damaged one.

    Args:
        path: the log.
        largest: bytes of a record; a larger one counts as damaged.

    Raises:
        ValueError: the log is of another version.
    """
    with path.open("rb") as file:
        header = file.read(_HEADER.size).ljust(_HEADER.size, b"\0")
        version = _HEADER.unpack(header)[1]
        if version != _VERSION:
            raise ValueError(f"{path}: expected version {_VERSION} or a database, got {version}")
        while len(head := file.read(_RECORD.size)) == _RECORD.size:
            marker, checksum, _, name, tokens = _RECORD.unpack(head)
            if marker != _MARKER or name + 4 * tokens > largest:
                break
            body = file.read(name + 4 * tokens)
            if zlib.crc32(body, zlib.crc32(head[_CHECKED:])) != checksum:
                break
            ids = np.frombuffer(body, "<u4", offset=name)
            yield body[:name].decode(errors="replace"), ids[ids < 2**31].astype(np.int32)
        else:
            if not head:
                return
    warnings.warn(f"{path}: skipped what lies behind the first damaged output", stacklevel=2)
