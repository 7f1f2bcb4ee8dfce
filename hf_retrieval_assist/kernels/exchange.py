"""Functions that stand for others where those are looked up, while any thread wants them to."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..system.locks import Lock


class Exchange:
    """Whether something stands in another's place; the last thread that wanted it takes it back.

    An exception may come between any two lines (Python raises KeyboardInterrupt where it likes).
    So nothing is counted: whatever one has left half done, the next `want` of any thread settles.

    Args:
        put, take_back: what to do, where it has not been done already.
    """

    def __init__(self, put: Callable[[], None], take_back: Callable[[], None]):
        self._put = put
        self._take_back = take_back
        self._lock = Lock()
        self._threads: set[int] = set()

    def want(self, wanted: bool) -> None:
        """Say whether the running thread wants it from now on."""
        with self._lock:
            change = self._threads.add if wanted else self._threads.discard
            change(threading.get_ident())
            settle = self._put if self._threads else self._take_back
            settle()
