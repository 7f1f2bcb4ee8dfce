"""What SIGTERM does to a command."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def on_sigterm(handler: Callable[..., Any]) -> Iterator[None]:
    """A scope in which SIGTERM calls a function, with the signal's number and the frame."""
    if threading.current_thread() is not threading.main_thread():  # which has no signals
        yield
        return
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
