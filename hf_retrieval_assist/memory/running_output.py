"""An output that a memory learns while it grows, and the name of what it is kept apart with."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

# Between a model's fingerprint and a prompt's name, which no fingerprint contains.
GROUP_MARK = "/"

# What an output costs besides its tokens and its fingerprint: its object and its place.
_OUTPUT_BYTES = 256

# Ids below this number are checked one by one, since a call of numpy takes longer.
_FEW = 64


def prompt_group(fingerprint: str, prompt_ids: NDArray[np.int32]) -> str:
    """The name under which outputs of one prompt are kept apart from a model's others."""
    ids = np.ascontiguousarray(prompt_ids, dtype=np.int32)
    return fingerprint + GROUP_MARK + hashlib.blake2b(ids.tobytes(), digest_size=12).hexdigest()


class Learner(Protocol):
    """What learns outputs."""

    def extend(
        self,
        outputs: Sequence[RunningOutput | None],
        token_ids: NDArray[np.int32],
        offsets: NDArray[np.int64],
    ) -> None:
        """Append tokens to outputs."""

    def finish(self, output: RunningOutput) -> None:
        """An output grows no more."""


class RunningOutput:
    """An output that a memory learns while it grows. One thread at a time.

    Args:
        memory: that learns it.
        fingerprint: of the model that writes it.
        epoch: see below.
        kept: whether its tokens are kept for a log.

    Attributes:
        fingerprint: of the model that writes it.
        cost: bytes that it takes in the memory besides its tokens.
        sequence: its id in the memory's tree; None before its first token and after its eviction.
        epoch: of the memory when the output was begun; one that was forgotten is not logged.
        finished: whether it grows no more.
        logged: whether it is in the log.
        full: whether the memory takes in no more of it.
    """

    __slots__ = (
        *("_kept", "_memory", "cost", "epoch", "finished", "fingerprint", "full", "logged"),
        "sequence",
    )

    def __init__(self, memory: Learner, fingerprint: str, epoch: int, kept: bool) -> None:
        self.fingerprint = fingerprint
        self.cost = _OUTPUT_BYTES + sys.getsizeof(fingerprint)
        self.sequence: int | None = None
        self.epoch = epoch
        self.finished = self.logged = self.full = False
        self._memory = memory
        # The tree has the tokens too, but not after an eviction.
        self._kept: array[int] | None = array("i") if kept else None

    @property
    def live_sequence(self) -> int | None:
        """Its id in the memory's tree while all of its tokens are there, otherwise None."""
        return None if self.full else self.sequence

    def extend(self, token_ids: Sequence[int] | NDArray[np.int32]) -> None:
        """Append tokens.

        Raises:
            ValueError: for a negative id, or one above 2^31 − 1.
        """
        tokens = _checked(token_ids)
        self._memory.extend([self], tokens, np.array([0, len(tokens)]))

    @property
    def is_kept(self) -> bool:
        """Whether its tokens are kept for the log."""
        return self._kept is not None

    def close(self) -> None:
        """The output is finished: write it to the log. Called once."""
        self._memory.finish(self)

    @property
    def kept_bytes(self) -> int:
        """Of the tokens that are kept for the log."""
        return 0 if self._kept is None else self._kept.itemsize * len(self._kept)

    def kept_tokens(self) -> NDArray[np.int32]:
        """The tokens that are kept for the log, int32 [n]."""
        return np.array(self._kept or (), np.int32)

    def keep(self, token_ids: NDArray[np.int32]) -> int:
        """Keep tokens for the log. Returns the bytes that this takes."""
        before = self.kept_bytes
        if self._kept is not None:
            self._kept.frombytes(token_ids.tobytes())
        return self.kept_bytes - before

    def keep_nothing(self) -> int:
        """Keep no tokens for the log, also later. Returns the bytes that this sets free."""
        freed, self._kept = self.kept_bytes, None
        return freed


def _checked(token_ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int32]:
    """A copy of ids as int32 [n]; ValueError for what is none."""
    tokens = np.array(token_ids, dtype=getattr(token_ids, "dtype", np.int64))
    ids = tokens.tolist() if len(tokens) < _FEW else [tokens.min(), tokens.max()]
    if len(ids) and not 0 <= min(ids) <= max(ids) < 2**31:
        raise ValueError(f"token_ids: expected 0 to 2^31 - 1, got {token_ids}")
    return tokens.astype(np.int32, copy=False)
