"""A process's view of the outputs that processes on any number of machines share by a server."""

from __future__ import annotations

import atexit
import logging
import random
import threading
import time
import weakref
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...memory.outputs import HANDED_OVER, Output, OutputQueue, SharedOutputs
from ...system.locks import Lock
from .redis_server import Answer, RedisServer

logger = logging.getLogger(__name__)

_PERIOD = 0.2  # seconds between exchanges while there is nothing to write
_BUSY = 0.01  # and while there is
_LONGEST_PAUSE = 5.0  # seconds between tries while the server is away
_LAST_WORDS = 2.0  # seconds that the end of the process waits for outputs to be delivered
_ENTRIES = 256  # read in one exchange
_BYTES_SENT = 1 << 20  # one exchange's, about
_RANDOM = random.SystemRandom()  # the process's own numbers are its caller's
_MOST_EPOCHS = 4  # that others may begin during one exchange


class OutputStream(SharedOutputs):
    """Outputs that are exchanged with a server in the background.

    Only `forget` and `sync` wait for the network: a thread exchanges outputs. While the server is
    away they wait here and are delivered later, at least once; readers know one that comes twice
    by its writer and its place. What waits to be delivered, what has arrived and was not read yet,
    and what the server keeps, are each bounded by `keep_bytes`; the oldest outputs go first.
    """

    place = "shared"
    beginning = b"0"

    def __init__(self, server: RedisServer, keep_bytes: int) -> None:
        super().__init__(keep_bytes)
        self.server = server
        self._changed = threading.Condition(Lock())
        self._began = time.monotonic()
        self._epoch: int | None = None  # none was heard
        self._arrived = OutputQueue(keep_bytes)
        self._complete = 0  # exchanges after which there was nothing left to write or to read
        self._wanted = 0  # such exchanges that `sync` waits for
        self._failures = 0  # tries in a row
        self._thread: threading.Thread | None = None
        self._start_thread()
        atexit.register(_say_last_words, weakref.ref(self))

    def read(self) -> tuple[list[str], list[Output]]:
        self._start_thread()
        with self._changed:
            outputs = self._arrived.first(HANDED_OVER)
            for _ in outputs:
                self._arrived.popleft()
            return self._take_forgotten(), outputs

    def append(self, fingerprint: str, token_ids: NDArray[np.int32]) -> bool:
        """See `SharedOutputs`. The output is queued for delivery."""
        self._start_thread()
        with self._changed:
            if fingerprint.startswith(tuple(self._forgotten)):
                return False
            self._pending.append(self._own(fingerprint, token_ids))
        if not self._failures:
            self._wake.set()
        return True

    def forget(self, prefix: str) -> int:
        """See `SharedOutputs`: the others hear of it at their next exchange. The server does not
        tell how many it drops.

        Raises:
            OSError: the server could not be told, so that only this process has forgotten.
        """
        with self._changed:
            self._drop([prefix])
        try:
            epoch = self.server.forget(self._epoch, [(None, prefix)])
        except Exception as error:  # whatever the server answered
            raise OSError(
                f"forgotten here, but the server at {self.server.place} could not be told: {error}"
            ) from error
        with self._changed:
            self._drop([prefix])
            # Exchanges under way go by the old epoch, and what they bring is not taken. The next
            # one tells the new epoch, and what else was forgotten.
            self._known[epoch], self._epoch = prefix, None
        return 0

    def sync(self, timeout: float) -> bool:
        self._start_thread()
        with self._changed:
            # An exchange that is under way may miss what was written just before.
            enough = self._wanted = self._complete + 2
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
            more = self._exchange_once()
        except Exception as error:
            if not self._failures:
                place = self.server.place
                logger.warning("outputs are not shared while %s cannot be used: %s", place, error)
            self._failures += 1
            pause = min(_PERIOD * 2.0 ** min(self._failures, 30), _LONGEST_PAUSE)
            return pause * _RANDOM.uniform(0.5, 1.0)
        if self._failures:
            logger.info("outputs are exchanged with %s again", self.server.place)
            self._failures = 0
        with self._changed:
            if not more:
                self._complete += 1
                self._changed.notify_all()
            return _BUSY if more or self._complete < self._wanted else _PERIOD

    def _exchange_once(self) -> bool:
        """Whether there is more to write or to read.

        What is written in one go is bounded, so that a slow line is not taken for a dead one; where
        the last try failed, it is a single output.
        """
        for _ in range(_MOST_EPOCHS):
            with self._changed:
                epoch = self._epoch
                sent = self._pending.first(0 if self._failures else _BYTES_SENT)
            answer = self.server.exchange(epoch, self._last_read, _ENTRIES, self.keep_bytes, sent)
            if answer.epoch == epoch:
                return self._take(answer, sent)
            self._hear_from(answer)
        raise ValueError("expected an epoch, got another one in every answer")

    def _hear_from(self, answer: Answer) -> None:
        """Hear what others have forgotten, and tell the server what it knows no more."""
        with self._changed:
            # What was forgotten before this process began, by the server's clock, or somewhat
            # earlier, is no matter of its own outputs.
            began = answer.now - 1e3 * (time.monotonic() - self._began)
            missing = self._hear(answer.forgotten, began)
            self._epoch = answer.epoch
        if missing:
            epoch = self.server.forget(answer.epoch, list(missing.items()))
            with self._changed:
                self._epoch = epoch

    def _take(self, answer: Answer, sent: Sequence[Output]) -> bool:
        """Take what an exchange brought; whether there is more to write or to read."""
        with self._changed:
            if answer.epoch != self._epoch:  # this process has forgotten something meanwhile
                return True
            for output in sent:
                if self._pending and self._pending[0] is output:  # it has not made room meanwhile
                    self._pending.popleft()
            for name, entry in answer.entries:
                self._last_read = name
                if entry is not None and self._is_new(entry):
                    self._arrived.append(entry)
            return bool(self._pending) or len(answer.entries) == _ENTRIES

    def _drop(self, prefixes: Sequence[str]) -> None:
        super()._drop(prefixes)
        self._arrived.forget(prefixes)


def _exchange_on(reference: weakref.ref[OutputStream], wake: threading.Event) -> None:
    """What the thread does, until nobody holds the stream any more."""
    while (stream := reference()) is not None:
        pause = stream._exchange()
        del stream
        wake.wait(pause)
        wake.clear()


def _say_last_words(reference: weakref.ref[OutputStream]) -> None:
    stream = reference()
    if stream is not None and stream._pending and not stream._failures:
        stream.sync(_LAST_WORDS)


def outputs_at(url: str, keep_bytes: int) -> OutputStream:
    """The outputs that a server of `redis://`, `rediss://` or `unix://` holds."""
    from .redis_server import RedisServer

    return OutputStream(RedisServer(url), keep_bytes)
