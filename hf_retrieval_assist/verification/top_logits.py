"""The largest logits behind the tokens of a forward, for drafters that learn from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..kernels.largest import largest

# Logits looked at together, so that a long prompt needs no large temporaries.
_CHUNK_CELLS = 1 << 25


class TopLogits(ABC):
    """The k largest logits of every fed token, and which tokens they are of.

    Attributes:
        free: whether looking at many nodes takes no more time than looking at few.
    """

    free: bool

    @abstractmethod
    def __len__(self) -> int:
        """Fed tokens."""

    @abstractmethod
    def joined(self, others: Sequence[Any]) -> TopLogits:
        """The fed tokens of this and of others of its kind, behind one another."""

    @abstractmethod
    def of(
        self, nodes: NDArray[np.int64], k: int, vocab_size: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Token ids and logits [n, k] behind the given nodes (ascending), largest first.

        Columns from `vocab_size` on, which fill the logits up, are left out.
        """


class FoundTop(TopLogits):
    """Found on the device together with the forward: token ids and logits [m, k] on the host."""

    free = True

    def __init__(self, ids: NDArray[np.int64], logits: NDArray[np.float32]):
        self._ids = ids
        self._logits = logits

    def __len__(self) -> int:
        return len(self._ids)

    def joined(self, others: Sequence[FoundTop]) -> FoundTop:
        found = self, *others
        return FoundTop(
            np.concatenate([one._ids for one in found]),
            np.concatenate([one._logits for one in found]),
        )

    def of(
        self, nodes: NDArray[np.int64], k: int, vocab_size: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        return self._ids[nodes, :k].astype(np.int32), self._logits[nodes, :k]


class ComputedTop(TopLogits):
    """Found when asked for, in logits [m, vocab_size] on any device.

    Args:
        logits: of all tokens of a forward.
        places: int64 [n], ascending, which of them; None: all.
    """

    def __init__(self, logits: torch.Tensor, places: NDArray[np.int64] | None = None):
        self.logits = logits
        self._places = np.arange(len(logits)) if places is None else places
        self.free = logits.device.type != "cpu"

    def __len__(self) -> int:
        return len(self._places)

    def joined(self, others: Sequence[ComputedTop]) -> ComputedTop:
        if any(other.logits is not self.logits for other in others):
            raise ValueError("expected tokens of one forward")
        places = [self._places, *[other._places for other in others]]
        return ComputedTop(self.logits, np.concatenate(places))

    def of(
        self, nodes: NDArray[np.int64], k: int, vocab_size: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        places = self._places[nodes]
        chunk = max(1, _CHUNK_CELLS // vocab_size)
        ids, values = np.empty((len(nodes), k), np.int32), np.empty((len(nodes), k), np.float32)
        for first in range(0, len(places), chunk):
            part = slice(first, first + chunk)
            best, found = largest(self.logits[:, :vocab_size], k, places[part])
            values[part], ids[part] = best.float().cpu().numpy(), found.cpu().numpy()
        return ids, values
