"""Files on disk: one way to replace and to read them, and where the package keeps its own."""

from __future__ import annotations

import errno
import functools
import glob
import json
import os
import secrets
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_CACHE = "hf_retrieval_assist"
# What file systems answer that cannot sync folders, as SMB and some FUSE.
_CANNOT = "EINVAL ENOTSUP EOPNOTSUPP ENOSYS EBADF EACCES EPERM"
_CANNOT_SYNC = {getattr(errno, name) for name in _CANNOT.split()}


def user_cache_directory() -> Path | None:
    """The package's folder in the user's cache directory, which may not exist yet. None, and one
    warning in a process, where the user has no home, as an arbitrary user of a container."""
    folder = _caches() / _CACHE
    if folder.is_absolute():
        return folder
    _tell_of_no_home()
    return None


def _caches() -> Path:
    """Where a user's programs keep what they can make again, as each system has it; a relative path
    where nobody knows."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():
        return given
    # What is empty names no home, nor does a ~ that stays.
    home = Path(os.environ.get("HOME", os.path.expanduser("~")))
    places = {"darwin": "Library/Caches", "win32": "AppData/Local"}
    return home / places.get(sys.platform, ".cache")


@functools.cache
def _tell_of_no_home() -> None:
    warnings.warn(
        "nothing is kept from one process to the next, since neither HOME nor XDG_CACHE_HOME names "
        "a folder; set XDG_CACHE_HOME to one that can be written to",
        stacklevel=3,
    )


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """A scope in which an `OSError` of the system that names no file names `path`."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk; of a folder, where its file
    system can say so. Raises an `OSError` that names `path`."""
    folder = path.is_dir()
    if folder and os.name == "nt":
        return
    with named_errors(path):
        descriptor = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if not (folder and error.errno in _CANNOT_SYNC):
                raise
        finally:
            os.close(descriptor)


@contextmanager
def replacing(path: Path, alone: bool = False) -> Iterator[Path]:
    """A new, empty file, which takes the place of `path` in one step when the block ends.

    It is on the disk before it does. Where the block raises, what was there stays. Errors of the
    disk name one of the two.

    Args:
        path: the file to replace, or to make.
        alone: the caller keeps others from replacing `path`, so that what a killed process has
            left of its attempt can go.
    """
    if alone:
        for left in path.parent.glob(f".{glob.escape(path.name)}.*.new"):
            left.unlink(missing_ok=True)
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    fresh.touch(exist_ok=False)
    try:
        with named_errors(path):
            yield fresh
        sync(fresh)
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """The place, for messages, and value of each line that is not blank; or the ValueError that
    says it has none."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            place = f"{path}:{number}"
            try:
                if line.strip():
                    yield place, json.loads(line)
            except (ValueError, RecursionError) as error:
                yield place, ValueError(f"{place}: expected JSON, got {error}")
