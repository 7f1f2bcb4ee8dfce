"""Files on disk: one way to replace and to read them, and where the package keeps its own."""

from __future__ import annotations

import glob
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import platformdirs

_CACHE = "hf_retrieval_assist"


def user_cache_directory() -> Path:
    """The package's folder in the user's cache directory, which may not exist yet."""
    return Path(platformdirs.user_cache_dir(_CACHE))


@contextmanager
def replacing(path: Path, alone: bool = False) -> Iterator[Path]:
    """A new, empty file, which takes the place of `path` in one step when the block ends.

    It is on the disk before it does. Where the block raises, what was there stays.

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
