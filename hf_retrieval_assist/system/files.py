"""Files on disk: one way to lock, replace and read them, and where the package keeps its own."""

from __future__ import annotations

import glob
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import platformdirs
from filelock import FileLock

_CACHE = "hf_retrieval_assist"


def user_cache_directory() -> Path:
    """The package's folder in the user's cache directory, which may not exist yet."""
    return Path(platformdirs.user_cache_dir(_CACHE))


@contextmanager
def locked(path: Path, patience: float) -> Iterator[None]:
    """Hold the lock file `path` (mode 0600) against other threads and processes.

    The file is made where it is missing, and deleted at the end.

    Args:
        path: the lock file.
        patience: seconds to wait while another one holds the lock.

    Raises:
        filelock.Timeout: another one held the lock for longer; it is an OSError.
    """
    with FileLock(path, timeout=patience, mode=0o600):
        try:
            yield
        finally:
            with suppress(OSError):  # Windows deletes no open file
                path.unlink()


@contextmanager
def replacing(path: Path, mode: int = 0o666, alone: bool = False) -> Iterator[Path]:
    """A new, empty file, which takes the place of `path` in one step when the block ends.

    It is on the disk before it does. Where the block raises, what was there stays.

    Args:
        path: the file to replace, or to make.
        mode: permissions of the new file, less the process's umask.
        alone: the caller keeps others from replacing `path`, so that what a killed process has
            left of its attempt can go.
    """
    if alone:
        for left in path.parent.glob(f".{glob.escape(path.name)}.*.new"):
            left.unlink(missing_ok=True)
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    try:
        yield fresh
        with fresh.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


class BlankLineError(ValueError):
    """A line of white space alone."""


def read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Each line's place, for messages, and its value; or the ValueError that says it has none."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            place = f"{path}:{number}"
            yield place, _parsed(line, place)


def _parsed(line: bytes, place: str) -> Any:
    if not line.strip():
        return BlankLineError(f"{place}: expected JSON, got a blank line")
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return ValueError(f"{place}: expected JSON, got {error}")
