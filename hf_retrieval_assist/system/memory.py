"""How much memory there is for what would only make things faster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

SHORTAGES = (MemoryError, torch.OutOfMemoryError)
"""What happens for reasons of the moment, and says nothing of a model."""

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")

# What copies of weights may take of the free memory where nobody has said: one part in so many.
_SHARE = 8


def may_take(nbytes: int, limit: int | None, other_bytes: int = 0) -> bool:
    """Whether copies of so many bytes more may be used under a limit.

    Args:
        limit: None: an eighth of the memory that is free; 0: no copies, those of others included.
        other_bytes: bytes of other copies that count against the limit.
    """
    if nbytes == 0:
        return limit != 0
    if limit is None:
        return nbytes <= free_memory() // _SHARE
    return nbytes + other_bytes <= limit


def free_memory() -> int:
    """Bytes that this process may still take without anything being swapped out or killed; 0 where
    the system does not say (it does on Linux)."""
    try:
        lines = _MEMINFO.read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        free = 1024 * int(fields["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError, IndexError):
        return 0
    return max(0, min([free, *_left_in_groups()]))


def _left_in_groups() -> Iterator[int]:
    """Bytes that each control group round this process may still take, of those with a limit."""
    try:
        # A container sees its own group alone, whose path is the root's.
        found = [line.split("::", 1) for line in _OWN_GROUP.read_text().splitlines()]
        own = Path(next(path for number, *rest in found if number == "0" for path in rest))
    except (OSError, StopIteration):
        own = Path("/")
    for group in (own, *own.parents):
        folder = _GROUP / group.relative_to("/")
        with suppress(OSError, ValueError):  # "max": none, a ValueError
            limit = int((folder / "memory.max").read_text())
            yield limit - int((folder / "memory.current").read_text())
