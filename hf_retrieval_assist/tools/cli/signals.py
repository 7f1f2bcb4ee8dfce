"""What SIGTERM does to a command."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ending_on_sigterm(code: int) -> Iterator[None]:
    """A scope that SIGTERM ends as an interruption does, by an exit with this code."""
    if threading.current_thread() is not threading.main_thread():  # which has no signals
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
