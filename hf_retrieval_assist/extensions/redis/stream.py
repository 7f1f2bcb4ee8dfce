"""A process's view of the outputs that processes on any number of machines share by a server."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections import deque
from contextlib import suppress
from itertools import islice
from typing import Any

from ...memory.log import HANDED_OVER, News, Output, SharedOutputs
from ...system.locks import Lock
from .redis_server import EXCHANGE, FORGET, KEYS, checked_place, client_of

logger = logging.getLogger(__name__)

_PERIOD = 0.2  # seconds between exchanges while there is nothing to write
_BUSY = 0.01  # while there is
_AWAY = 2.0  # and after one that failed
_LAST_WORDS = 2.0  # seconds that the end of the process waits for outputs to be delivered
_SENT = 16  # outputs written in one exchange
_READ = 64  # and read
_OUTPUT_BYTES = 256  # an output's besides its fingerprint and ids


class OutputStream(SharedOutputs):
    """Outputs that are exchanged with a server in the background.

    Only `forget` and `sync` wait for the network: a thread exchanges outputs. While the server is
    away they wait here and are delivered later, at least once. What waits to be delivered, what has
    arrived and was not read yet, and what the server keeps, are each bounded by `keep_bytes`; the
    oldest outputs go first.

    Args:
        url: `redis://`, `rediss://` or `unix://`, as the `redis` client reads it; with a password,
            unless the host is this machine.
        keep_bytes: as above.

    Raises:
        ValueError: the URL is none of the client's, or lacks a password.
        ImportError: the `redis` extra is not installed.
    """

    place = "shared"

    def __init__(self, url: str, keep_bytes: int) -> None:
        self.server = checked_place(url)
        self.keep_bytes = keep_bytes
        client = client_of(url)
        self._call_exchange, self._call_forget = map(client.register_script, (EXCHANGE, FORGET))
        self.waiting_bytes = 2 * keep_bytes
        self._network = Lock()  # held by who waits for the server; taken before the other one
        self._changed = threading.Condition(Lock())
        self._mark = b""  # the server has not answered yet
        self._last = b"0"
        self._anew = False
        self._writer = os.urandom(16)
        self._pending, self._arrived = _Queue(keep_bytes), _Queue(keep_bytes)
        self._complete = 0  # exchanges after which there was nothing left to write or to read
        self._failing = False
        self._thread: threading.Thread | None = None
        self._start_thread()
        atexit.register(_say_last_words, weakref.ref(self))

    def read(self, wait: bool = True) -> News:
        self._start_thread()
        with self._changed:
            if self._anew:
                self._anew = False
                return News(True, [])
            outputs, size = [], 0
            while self._arrived.outputs and size <= HANDED_OVER:
                outputs.append(self._arrived.popleft())
                size += outputs[-1].token_ids.nbytes
            return News(False, outputs)

    def append(self, output: Output, wait: bool = True) -> bool:
        """See `SharedOutputs`. The output is queued for delivery."""
        self._start_thread()
        with self._changed:
            if self._anew:
                return False
            self._pending.append(output)
        if not self._failing:
            self._wake.set()
        return True

    def forget(self, prefix: str) -> int:
        """See `SharedOutputs`: the others hear of it at their next exchange. The server does not
        tell how many it drops."""
        try:
            with self._network:
                with self._changed:
                    self._pending.forget(prefix)
                    self._arrived.forget(prefix)
                mark = _random_mark()
                before = bytes(memoryview(self._call_forget(KEYS, [prefix, mark])))
                with self._changed:
                    if before == self._mark:  # otherwise others have forgotten something, too
                        self._mark = mark
        except Exception as error:  # whatever the server answered
            raise OSError(
                f"forgotten here, but the server at {self.server} could not be told: {error}"
            ) from error
        return 0

    def sync(self, timeout: float) -> bool:
        self._start_thread()
        with self._changed:
            # An exchange that is under way may miss what was written just before.
            enough = self._complete + 2
            self._wake.set()
            return self._changed.wait_for(lambda: self._complete >= enough, timeout)

    def _start_thread(self) -> None:
        """Start the thread, which a fork leaves behind."""
        if self._thread is None or not self._thread.is_alive():
            self._wake = threading.Event()
            arguments = (weakref.ref(self), self._wake)
            self._thread = threading.Thread(target=_exchange_on, args=arguments, daemon=True)
            self._thread.start()

    def _exchange(self) -> float:
        """Write what waits and read what is new. Returns the seconds to wait until the next time.

        Nothing that the server does ends the thread, or lets it try without a pause.
        """
        try:
            with self._network:
                more = self._exchange_once()
        except Exception as error:
            if not self._failing:
                told = "outputs are not shared while %s cannot be used: %s"
                logger.warning(told, self.server, error)
            self._failing = True
            return _AWAY
        if self._failing:
            logger.info("outputs are exchanged with %s again", self.server)
            self._failing = False
        with self._changed:
            if more:
                return _BUSY
            self._complete += 1
            self._changed.notify_all()
            return _PERIOD

    def _exchange_once(self) -> bool:
        """Whether there is more to write or to read."""
        with self._changed:
            sent = list(islice(self._pending.outputs, _SENT))
        # A fork has its parent's number, but not its place.
        writer = self._writer + os.getpid().to_bytes(8)
        written = [part for one in sent for part in (one.fingerprint, one.stored_ids())]
        known = [self._mark, _random_mark(), self._last, _READ, self.keep_bytes, writer]
        found, entries = self._call_exchange(KEYS, [*known, *written])
        mark = bytes(memoryview(found))
        names = [bytes(memoryview(name)) for name, _ in entries]
        arrived = [output for _, fields in entries if (output := _output(fields, writer))]
        with self._changed:
            if mark != self._mark:
                if self._mark:
                    self._anew = True
                    self._writer = os.urandom(16)  # what was written is read again
                    self._pending.forget("")
                    self._arrived.forget("")
                self._mark, self._last = mark, b"0"
                return True
            waiting = self._pending.outputs
            for output in sent:
                if waiting and waiting[0] is output:  # it has not made room meanwhile
                    self._pending.popleft()
            self._last = [self._last, *names][-1]
            for output in arrived:
                self._arrived.append(output)
            return bool(waiting) or len(entries) == _READ


class _Queue:
    """Outputs in order, of so many bytes at most: the oldest make room for new ones."""

    def __init__(self, keep_bytes: int) -> None:
        self.outputs: deque[Output] = deque()
        self._keep_bytes = keep_bytes
        self._bytes = 0

    def append(self, output: Output) -> None:
        self.outputs.append(output)
        self._bytes += _size(output)
        while self._bytes > self._keep_bytes:
            self.popleft()

    def popleft(self) -> Output:
        self._bytes -= _size(self.outputs[0])
        return self.outputs.popleft()

    def forget(self, prefix: str) -> None:
        for _ in range(len(self.outputs)):
            output = self.popleft()
            if not output.fingerprint.startswith(prefix):
                self.append(output)


def _random_mark() -> bytes:
    return os.urandom(8).hex().encode()


def _output(fields: Any, writer: bytes) -> Output | None:
    """Another process's output; None for an entry of another kind, or a damaged one."""
    with suppress(AttributeError, KeyError, TypeError, ValueError):
        parts = dict(zip(fields[::2], fields[1::2], strict=True))
        if parts[b"by"] != writer:
            return Output.parse(parts[b"model"].decode(), parts[b"ids"])
    return None


def _size(output: Output) -> int:
    return output.token_ids.nbytes + len(output.fingerprint) + _OUTPUT_BYTES


def _exchange_on(reference: weakref.ref[OutputStream], wake: threading.Event) -> None:
    """What the thread does, until nobody holds the stream any more."""
    while (stream := reference()) is not None:
        pause = stream._exchange()
        del stream
        wake.wait(pause)
        wake.clear()


def _say_last_words(reference: weakref.ref[OutputStream]) -> None:
    stream = reference()
    if stream is not None and stream._pending.outputs and not stream._failing:
        stream.sync(_LAST_WORDS)
