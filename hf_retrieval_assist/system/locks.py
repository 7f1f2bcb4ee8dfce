"""Locks that a fork leaves usable.

Threads do not live on in a forked child. A lock that another one holds at that moment would stay
locked there for ever, and what it guards half changed; so a fork waits until nothing is.
"""

from __future__ import annotations

import _thread
import os
import threading
import time
import weakref

_PATIENCE = 2.0  # seconds; the long holders guard only Python objects, whole at any time
# The same one when this module is loaded anew, which registers its functions once more.
_alive: weakref.WeakValueDictionary[int, Lock] = globals().setdefault(
    "_alive", weakref.WeakValueDictionary()
)
_forking = threading.local()


class Lock(_thread.RLock):  # type: ignore[misc]  # final in stubs only
    """A reentrant lock, held by `with`.

    Its `__exit__` is not Python's code, before which a KeyboardInterrupt could keep it locked.
    """

    def __init__(self) -> None:
        _alive[id(self)] = self


DRAWS = Lock()
"""Held by whoever draws from a device's own generator, or exchanges its state."""


def _all() -> list[Lock]:
    found = [reference() for reference in _alive.valuerefs()]
    return [lock for lock in found if lock is not None]


def _hold_all() -> None:
    """Hold every lock, or after a while those that are free. None is waited for while others are
    held, since no order of theirs is known."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        locks = _all()
        held = [lock for lock in locks if lock.acquire(blocking=False)]
        if len(held) == len(locks) or time.monotonic() > deadline:
            _forking.held = [*getattr(_forking, "held", ()), *held]
            return
        for lock in held:
            lock.release()
        time.sleep(0.001)


def _release_in_parent() -> None:
    while _forking.held:
        _forking.held.pop().release()


def _release_in_child() -> None:
    free = set(map(id, _forking.held))
    for lock in _all():
        if id(lock) not in free:
            lock._at_fork_reinit()  # type: ignore[attr-defined]
    _release_in_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_hold_all,
        after_in_parent=_release_in_parent,
        after_in_child=_release_in_child,
    )
