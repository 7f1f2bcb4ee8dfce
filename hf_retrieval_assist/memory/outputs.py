"""Finished outputs, and what a process needs of others' outputs, wherever these are kept."""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

HANDED_OVER = 1 << 14  # tokens that one `read` returns, about: learnt in a few milliseconds
_OVERHEAD = 64  # bytes of an output besides its fingerprint and ids
_WRITERS = 1 << 14  # those whose last output is known


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
        """As they are kept, token ids as little-endian uint32."""
        ids = self.token_ids.astype("<u4").tobytes()
        return self.by, self.sequence, self.fingerprint, ids

    @classmethod
    def from_fields(cls, by: bytes, sequence: int, fingerprint: str, ids: bytes) -> Output:
        """ValueError where `ids` are no token ids."""
        token_ids = np.frombuffer(ids, "<u4")
        # An id that no model has would be refused by the tree; the output's other ids are good.
        return cls(by, sequence, fingerprint, token_ids[token_ids < 2**31].astype(np.int32))


class Writers:
    """Which outputs have been seen: those of one writer are read in order.

    Outputs of this process and of each fork of it have a writer of their own.
    """

    def __init__(self) -> None:
        self._last: OrderedDict[bytes, int] = OrderedDict()
        self._process = 0

    def own(self, fingerprint: str, token_ids: NDArray[np.int32]) -> Output:
        """A new output of this process, which counts as seen."""
        if self._process != os.getpid():
            self._process, self._me, self._written = os.getpid(), os.urandom(16), 0
        self._written += 1
        output = Output(self._me, self._written, fingerprint, token_ids)
        self.is_new(output)
        return output

    def is_new(self, output: Output) -> bool:
        """Whether an output was not seen before; it counts as seen from now on."""
        if output.sequence <= self._last.get(output.by, -1):
            return False
        self._last[output.by] = output.sequence
        self._last.move_to_end(output.by)
        if len(self._last) > _WRITERS:
            self._last.popitem(last=False)
        return True

    def clear(self) -> None:
        """Count nothing as seen."""
        self._last.clear()


class SharedOutputs(Protocol):
    """A process's view of finished outputs that other processes read and write too.

    Outputs have names that grow with time, and an epoch, which is such a name: what is named lower
    was forgotten. A view that knows a later epoch than the shared outputs have, since these came
    back from an older copy, forgets them there anew.
    """

    def read(self) -> tuple[bool, list[Output]]:
        """Whether everything read or written before was forgotten, and outputs of other processes
        that were not read before, about `HANDED_OVER` tokens at most; none if there are no more.
        """

    def append(self, fingerprint: str, token_ids: NDArray[np.int32]) -> bool:
        """Write an output. False, and nothing is written, if another process has forgotten
        everything since the last `read`."""

    def forget(self) -> None:
        """Drop all outputs, for every process.

        Raises:
            OSError: the others could not be told.
        """

    def sync(self, timeout: float) -> bool:
        """Wait until what was written is with the others and what they wrote can be read.

        Returns:
            Whether that was so within `timeout` seconds.
        """
