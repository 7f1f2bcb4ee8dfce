"""Reads requests in threads beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from weakref import WeakValueDictionary

LIGHT = 1 << 16  # bytes of a body that takes milliseconds


class Readers:
    """Two threads: one reads requests that take milliseconds, the other one those that may take
    seconds, which so hold each other alone. In either the tenants have their turns."""

    def __init__(self) -> None:
        self._threads = [ThreadPoolExecutor(1, f"reading {kind}") for kind in ("light", "heavy")]
        self._turns: WeakValueDictionary[Any, asyncio.Lock] = WeakValueDictionary()
        self._work: set[Future[None]] = set()

    async def read(self, tenant: str | None, heavy: bool, function: Callable[[], None]) -> None:
        """Run a function in its turn; not at all where the caller is cancelled before."""
        # A tenant has one request in a thread's queue, behind at most one of each other's.
        async with self._turns.setdefault((tenant, heavy), asyncio.Lock()):
            work = self._threads[heavy].submit(function)
            self._work.add(work)
            work.add_done_callback(self._work.discard)
            await asyncio.wrap_future(work)

    @property
    def is_idle(self) -> bool:
        """Whether no thread reads."""
        return not any(work.running() for work in [*self._work])
