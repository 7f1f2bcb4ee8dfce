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
_FORMER_CACHE = "hf-retrieval-assist"
_POLL = 0.002  # seconds; a log is locked for less


def user_cache_directory() -> Path:
    """The package's folder in the user's cache directory, which may not exist yet.

    What earlier versions kept in a folder of another name moves in.
    """
    folder = Path(platformdirs.user_cache_dir(_CACHE))
    former = Path(platformdirs.user_cache_dir(_FORMER_CACHE))
    # Another process may be quicker, or the directory read-only: then it stays as it is.
    with suppress(OSError):
        for file in former.iterdir():
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / file.name).exists():
                file.unlink()
            else:
                file.rename(folder / file.name)
        former.rmdir()
    return folder


@contextmanager
def locked(path: Path, wait: bool = True, keep: bool = True) -> Iterator[None]:
    """Hold the lock file `path` (mode 0600) against other threads and processes.

    Args:
        path: the lock file, made where it is missing.
        wait: until the lock is free; otherwise raise.
        keep: leave the file behind.

    Raises:
        filelock.Timeout: another one holds the lock, and `wait` is false.
    """
    with FileLock(path, timeout=-1 if wait else 0, mode=0o600, poll_interval=_POLL):
        try:
            yield
        finally:
            if not keep:
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
