"""A process's view of the outputs that processes on any number of machines share by a server."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, takewhile

import numpy as np
from numpy.typing import NDArray

from .outputs import HANDED_OVER, Output, Writers
from .redis_server import RedisServer

logger = logging.getLogger(__name__)

_PERIOD = 0.2  # seconds between exchanges while there is nothing to write
_LONGEST_PAUSE = 5.0  # seconds between tries while the server is away
_LAST_WORDS = 2.0  # seconds that the end of the process waits for outputs to be delivered
_ENTRIES = 256  # read in one exchange
_BYTES_SENT = 1 << 20  # in one exchange, about


class _Queue(deque[Output]):
    """Outputs in order, of `keep_bytes` at most: the oldest make room for new ones."""

    def __init__(self, keep_bytes: int) -> None:
        super().__init__()
        self.keep_bytes = keep_bytes
        self.nbytes = 0

    def append(self, output: Output) -> None:
        super().append(output)
        self.nbytes += output.nbytes
        while self.nbytes > self.keep_bytes:
            self.popleft()

    def popleft(self) -> Output:
        output = super().popleft()
        self.nbytes -= output.nbytes
        return output

    def clear(self) -> None:
        super().clear()
        self.nbytes = 0

    def first(self, limit: int) -> list[Output]:
        """The oldest outputs, of about `limit` bytes."""
        before = accumulate((output.nbytes for output in self), initial=0)
        return [output for output, _ in zip(self, takewhile(limit.__ge__, before), strict=False)]

    def remove_first(self, outputs: Sequence[Output]) -> None:
        """Remove what `first` returned, as far as it has not made room meanwhile."""
        for output in outputs:
            if self and self[0] is output:
                self.popleft()


_streams: weakref.WeakSet[OutputStream] = weakref.WeakSet()


class OutputStream:
    """Outputs that are exchanged with a server in the background.

    Only `forget` and `sync` wait for the network: a thread exchanges outputs. While the server is
    away they wait here and are delivered later, at least once; readers know one that comes twice
    by its writer and its place. What waits to be delivered, what has arrived and was not read yet,
    and what the server keeps, are each bounded by `keep_bytes`; the oldest outputs go first.

    Args:
        server: where the outputs are kept.
        keep_bytes: see above.
    """

    def __init__(self, server: RedisServer, keep_bytes: int) -> None:
        self.server = server
        self.keep_bytes = keep_bytes
        self._changed = threading.Condition()
        self._wake = threading.Event()
        self._epoch: int | None = None  # none was heard
        self._began = time.monotonic()
        self._forgotten = False  # since the last `read`
        self._last_entry = b"0"
        self._writers = Writers()
        self._pending, self._arrived = _Queue(keep_bytes), _Queue(keep_bytes)
        self._complete = 0  # exchanges after which there was nothing left to write or to read
        self._wanted = 0  # such exchanges that `sync` waits for
        self._pause = 0.0  # before the next try; above 0 while the server is away
        self._thread: threading.Thread | None = None
        self._start_thread()
        _streams.add(self)
        atexit.register(_say_last_words, weakref.ref(self))

    def read(self) -> tuple[bool, list[Output]]:
        """See `SharedOutputs`."""
        self._start_thread()
        with self._changed:
            outputs: list[Output] = []
            tokens = 0
            while self._arrived and tokens < HANDED_OVER:
                outputs.append(self._arrived.popleft())
                tokens += len(outputs[-1].token_ids)
            forgotten, self._forgotten = self._forgotten, False
            return forgotten, outputs

    def append(self, fingerprint: str, token_ids: NDArray[np.int32]) -> bool:
        """See `SharedOutputs`. The output is queued for delivery."""
        self._start_thread()
        with self._changed:
            if self._forgotten:
                return False
            self._pending.append(self._writers.own(fingerprint, token_ids))
        self._wake.set()
        return True

    def forget(self) -> None:
        """Drop all outputs, for every process: the others hear of it at their next exchange.

        Raises:
            OSError: the server could not be told, so that only this process has forgotten.
        """
        with self._changed:
            self._forget()
        try:
            epoch = self.server.forget(self._epoch)
        except self.server.errors as error:
            raise OSError(
                f"forgotten here, but the server at {self.server.place} could not be told: {error}"
            ) from error
        with self._changed:
            # Exchanges under way go by the old epoch, and what they bring is not taken.
            self._epoch = max(self._epoch or 0, epoch)
            self._forget()
            self._forgotten = False

    def sync(self, timeout: float) -> bool:
        """Wait until what was appended is delivered and what the server has is here to be read.

        Returns:
            Whether that was so within `timeout` seconds.
        """
        self._start_thread()
        with self._changed:
            # An exchange that is under way may miss what was written just before.
            enough = self._wanted = self._complete + 2
            self._wake.set()
            return self._changed.wait_for(lambda: self._complete >= enough, timeout)

    def _start_thread(self) -> None:
        """Start the thread, which a fork leaves behind."""
        if self._thread is None or not self._thread.is_alive():
            arguments = (weakref.ref(self), self._wake)
            self._thread = threading.Thread(target=_exchange_on, args=arguments, daemon=True)
            self._thread.start()

    def _exchange(self) -> float:
        """Write what waits and read what is new. Returns the seconds to wait until the next time.

        What is written in one go is bounded, so that a slow line is not taken for a dead one.
        """
        with self._changed:
            epoch, sent = self._epoch, self._pending.first(_BYTES_SENT)
        try:
            answer = self.server.exchange(
                epoch, self._began, self._last_entry, _ENTRIES, self.keep_bytes, sent
            )
        except self.server.errors as error:
            return self._wait_for_server(error)
        if self._pause:
            logger.info("outputs are exchanged with %s again", self.server.place)
            self._pause = 0.0
        with self._changed:
            # This process may have forgotten everything meanwhile; then the next answer counts.
            if epoch == self._epoch:
                self._take(*answer, sent)
            more = self._epoch != epoch or bool(self._pending) or len(answer[2]) == _ENTRIES
            if not more:
                self._complete += 1
                self._changed.notify_all()
            return 0.0 if more or self._complete < self._wanted else _PERIOD

    def _wait_for_server(self, error: Exception) -> float:
        if not self._pause:
            logger.warning(
                "outputs are not shared while %s cannot be reached: %s", self.server.place, error
            )
        self._pause = min(2 * self._pause + _PERIOD, _LONGEST_PAUSE)
        return self._pause

    def _take(
        self,
        epoch: int,
        forgotten: bool,
        entries: Sequence[tuple[bytes, Output | None]],
        sent: Sequence[Output],
    ) -> None:
        self._epoch = epoch
        if forgotten:
            self._forget()
            self._forgotten = True
            return
        self._pending.remove_first(sent)
        for name, output in entries:
            self._last_entry = name
            if output is not None and self._writers.is_new(output):
                self._arrived.append(output)

    def _forget(self) -> None:
        """What the server has since then is read from the beginning."""
        self._pending.clear()
        self._arrived.clear()
        self._last_entry = b"0"
        self._writers.clear()


def _exchange_on(reference: weakref.ref[OutputStream], wake: threading.Event) -> None:
    """What the thread does, until nobody holds the stream any more."""
    while (stream := reference()) is not None:
        pause = stream._exchange()
        del stream
        wake.wait(pause)
        wake.clear()


def _say_last_words(reference: weakref.ref[OutputStream]) -> None:
    stream = reference()
    if stream is not None and stream._pending and not stream._pause:
        stream.sync(_LAST_WORDS)


def _renew_conditions() -> None:
    """The thread that may have held them does not live on in a forked child."""
    for stream in list(_streams):
        stream._changed, stream._wake = threading.Condition(), threading.Event()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_conditions)
