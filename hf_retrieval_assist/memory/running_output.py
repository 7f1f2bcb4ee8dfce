"""An output that a memory learns while it grows, and the kinds of outputs that are kept apart."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..structures.suffix_tree import SuffixTree
from ..types.token_tree import checked_ids

# Separates a model's fingerprint from a prompt's name; no fingerprint contains it.
GROUP_MARK = "/"

# What an output costs besides its tokens and its fingerprint: its object and its places in order.
_OUTPUT_BYTES = 256


def prompt_group(fingerprint: str, prompt_ids: NDArray[np.int32]) -> str:
    """The name under which outputs of one prompt are kept apart from a model's others."""
    ids = np.ascontiguousarray(prompt_ids, dtype=np.int32)
    return fingerprint + GROUP_MARK + hashlib.blake2b(ids.tobytes(), digest_size=12).hexdigest()


class RunningOutput:
    """An output that a memory learns while it grows. One thread at a time.

    Args:
        memory: the `OutputMemory` that learns it.
        fingerprint: of the model that writes it.
        forgettings: of that memory, before it began.

    Attributes:
        fingerprint: of the model that writes it.
        forgettings: as above.
        cost: bytes that it takes in the memory besides its tokens.
        sequence: its id in the memory's tree; None before its first token, and once it is dropped.
        finished: whether it grows no more.
        full: whether the memory takes in no more of it, for want of room or since it was forgotten.
        lasts: the number of the later output of its kind that it does not outlive.
    """

    __slots__ = (
        *("_memory", "cost", "fingerprint", "finished", "forgettings", "full", "lasts"),
        "sequence",
    )

    def __init__(self, memory: Any, fingerprint: str, forgettings: int) -> None:
        self.fingerprint = fingerprint
        self.forgettings = forgettings
        self.cost = _OUTPUT_BYTES + sys.getsizeof(fingerprint)
        self.sequence: int | None = None
        self.finished = self.full = False
        self.lasts = math.inf
        self._memory = memory

    @property
    def live_sequence(self) -> int | None:
        """Its id in the memory's tree while all of its tokens are there, otherwise None."""
        return None if self.full else self.sequence

    def extend(self, token_ids: Sequence[int] | NDArray[np.int32]) -> None:
        """Append tokens.

        Raises:
            TypeError, ValueError: see `checked_ids`.
        """
        tokens = checked_ids("token_ids", token_ids)
        self._memory.extend([self], tokens, np.array([0, len(tokens)]))

    def close(self) -> None:
        """The output is finished: write it to the log. Called once."""
        self._memory.finish(self)


class OutputTree:
    """Outputs with one fingerprint.

    Attributes:
        tree: that holds them.
        outputs: in the tree.
    """

    def __init__(self, max_depth: int) -> None:
        self.tree = SuffixTree(max_depth)
        self.outputs: dict[RunningOutput, None] = {}
        self._finished = 0  # so many have come

    def fade(self, newest: RunningOutput, half_life: float) -> list[RunningOutput]:
        """The older outputs to be dropped by chance, now that one more is finished.

        How long an output lasts is drawn at its end, from its kind and number alone: no tenant can
        tell from its own outputs that others have finished some.
        """
        self._finished += 1
        faded = [output for output in self.outputs if output.lasts <= self._finished]
        drawn = f"{newest.fingerprint} {self._finished}".encode(errors="surrogatepass")
        number = int.from_bytes(hashlib.blake2b(drawn, digest_size=8).digest()) + 1
        newest.lasts = self._finished + half_life * (64 - math.log2(number))
        return faded
