"""Finished outputs, and what a process needs of others' outputs, wherever these are kept."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

HANDED_OVER = 1 << 16  # bytes that one `read` returns, about: learnt in a few milliseconds
MOST_FORGETTINGS = 1 << 12  # that are kept one by one
_OVERHEAD = 64  # bytes of an output besides its fingerprint and ids
_WRITERS = 1 << 14  # those whose last output is known

# Each forgetting's name and a prefix of fingerprints: all outputs with that prefix and a lower
# name are gone. The empty prefix is that of all outputs.
Forgettings = dict[int, str]


@dataclass(frozen=True)
class Output:
    """A finished output.

    Attributes:
        by: the writer, 16 random bytes.
        sequence: its place among that writer's outputs.
        fingerprint: of the model.
        token_ids: int32 [n].
    """

    by: bytes
    sequence: int
    fingerprint: str
    token_ids: NDArray[np.int32]

    @property
    def nbytes(self) -> int:
        return 4 * len(self.token_ids) + len(self.fingerprint) + _OVERHEAD

    def fields(self) -> tuple[bytes, int, str, bytes]:
        """What is kept of it, token ids as little-endian uint32."""
        ids = self.token_ids.astype("<u4").tobytes()
        return self.by, self.sequence, self.fingerprint, ids

    @classmethod
    def from_fields(cls, by: bytes, sequence: int, fingerprint: str, ids: bytes) -> Output:
        """ValueError where `ids` are no token ids."""
        token_ids = np.frombuffer(ids, "<u4")
        # An id that no model has would be refused by the tree; the output's other ids are good.
        return cls(by, sequence, fingerprint, token_ids[token_ids < 2**31].astype(np.int32))


class OutputQueue(deque[Output]):
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

    def forget(self, prefixes: Sequence[str]) -> None:
        """Remove the outputs whose fingerprints have one of these prefixes."""
        for _ in range(len(self)):
            output = self.popleft()
            if not output.fingerprint.startswith(tuple(prefixes)):
                self.append(output)

    def first(self, limit: int) -> list[Output]:
        """The oldest outputs, of about `limit` bytes; for 0 a single one."""
        before = accumulate((output.nbytes for output in self), initial=0)
        found = takewhile(lambda pair: pair[1] <= limit, zip(self, before, strict=False))
        return [output for output, _ in found]


class SharedOutputs(ABC):
    """A process's view of finished outputs that other processes read and write too.

    Outputs and forgettings have names that grow with time: an output with a forgotten prefix and a
    lower name than the forgetting is gone. Of many forgettings the oldest become one of everything
    that is older still. A view forgets anew what it knows to be forgotten where the shared outputs
    have come back from an older copy.

    Outputs that cannot be written yet wait, of `keep_bytes` at most.
    """

    place: str  # what an `OutputMemory` shows
    beginning: Any  # the name that all outputs come behind

    def __init__(self, keep_bytes: int) -> None:
        self.keep_bytes = keep_bytes
        self._known: Forgettings = {}
        self._heard = False  # whether what is stored has been looked at
        self._forgotten: list[str] = []  # others' since the last `read`
        self._seen: OrderedDict[bytes, int] = OrderedDict()  # each writer's last output that was
        self._process = 0
        self._pending = OutputQueue(keep_bytes)
        self._last_read = self.beginning

    @abstractmethod
    def read(self) -> tuple[list[str], list[Output]]:
        """The prefixes that others have forgotten, and outputs of other processes, none of which
        was read before: about `HANDED_OVER` bytes at most; none if there are no more.

        The forgettings come before these outputs.
        """

    @abstractmethod
    def append(self, fingerprint: str, token_ids: NDArray[np.int32]) -> bool:
        """Write an output, or a later time where it cannot be written now. False, and it is not
        written, if another process has forgotten its prefix since the last `read`."""

    @abstractmethod
    def forget(self, prefix: str) -> int:
        """Drop the outputs whose fingerprints have this prefix, for every process; how many those
        were, where that is told.

        Raises:
            OSError: the others could not be told.
            ValueError: what there is holds no outputs; not for the empty prefix, all outputs'.
        """

    @abstractmethod
    def sync(self, timeout: float) -> bool:
        """Wait until what was written is with the others and what they wrote can be read.

        Returns:
            Whether that was so within `timeout` seconds.
        """

    def _own(self, fingerprint: str, token_ids: NDArray[np.int32]) -> Output:
        """A new output of this process or fork, each of which is a writer; it counts as seen."""
        if self._process != os.getpid():
            self._process, self._me, self._written = os.getpid(), os.urandom(16), 0
        self._written += 1
        output = Output(self._me, self._written, fingerprint, token_ids)
        self._is_new(output)
        return output

    def _is_new(self, output: Output) -> bool:
        """Whether an output was not seen before, those of one writer being read in order; it counts
        as seen from now on."""
        if output.sequence <= self._seen.get(output.by, -1):
            return False
        self._seen[output.by] = output.sequence
        self._seen.move_to_end(output.by)
        if len(self._seen) > _WRITERS:
            self._seen.popitem(last=False)
        return True

    def _drop(self, prefixes: Sequence[str]) -> None:
        """Drop what waits with one of these prefixes."""
        self._pending.forget(prefixes)
        if "" in prefixes:  # an old one perhaps: what has been written since is read again
            self._last_read = self.beginning
            self._seen.clear()

    def _hear(self, stored: Forgettings, began: float) -> Forgettings:
        """Hear of the forgettings that are stored now and were not known: the first time of those
        from `began` on, later on of all, since an older one may come back.

        Returns those known that are stored no more, since an older copy came back, but for those
        from before a forgetting of everything.
        """
        everything = max((name for name, prefix in stored.items() if not prefix), default=0)
        known = self._known.items()
        missing = {n: prefix for n, prefix in known if n not in stored and n > everything}
        unknown = stored.keys() - self._known.keys()
        news = [stored[name] for name in sorted(unknown) if self._heard or name >= began]
        self._known, self._heard = stored | missing, True
        self._forgotten += news
        self._drop(news)
        return missing

    def _take_forgotten(self) -> list[str]:
        forgotten, self._forgotten = self._forgotten, []
        return forgotten
