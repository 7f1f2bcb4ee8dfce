"""How much memory there is for what would only make things faster."""

from __future__ import annotations

from pathlib import Path

import torch

SHORTAGES = (MemoryError, torch.OutOfMemoryError)
"""What happens for reasons of the moment, and says nothing of a model."""

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")

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
    try:
        limit = int((_GROUP / "memory.max").read_text())  # "max": none, a ValueError
        taken = int((_GROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return max(0, min(free, limit - taken))
