"""The largest logits behind the tokens of a forward, for drafters that learn from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_BLOCK = 256  # columns per maximum in `top_k`

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
        places = [self._places, *(other._places for other in others)]
        return ComputedTop(self.logits, np.concatenate(places))

    def of(
        self, nodes: NDArray[np.int64], k: int, vocab_size: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        ids, values = np.empty((len(nodes), k), np.int32), np.empty((len(nodes), k), np.float32)
        places = self._places[nodes]
        chunk = max(1, _CHUNK_CELLS // vocab_size)
        for start in range(0, len(nodes), chunk):
            part = places[start : start + chunk]
            # Rows of one stretch, so that what lies between the nodes is not copied.
            first, last = int(part[0]), int(part[-1])
            near = torch.from_numpy(part - first).to(self.logits.device)
            best, found = top_k(self.logits[first : last + 1, :vocab_size], near, k)
            torch.from_numpy(values[start : start + chunk]).copy_(best)
            torch.from_numpy(ids[start : start + chunk]).copy_(found)
        return ids, values


def top_k(logits: torch.Tensor, rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and indices [n, k] of the k largest of the given rows of [m, vocab_size], descending.

    The k largest lie in the k blocks with the largest maxima, and a maximum is several times
    cheaper than a selection: on a CPU this takes a fifth of `torch.topk` at 262,144 entries.
    """
    blocks = logits.shape[1] // _BLOCK
    if blocks <= 4 * k:
        whole = logits[rows].topk(k, dim=1)
        return whole.values, whole.indices
    head = blocks * _BLOCK
    by_block = logits[:, :head].unflatten(1, (blocks, _BLOCK))
    # The maxima of all rows cost less than copying the wanted ones together.
    best = by_block.amax(2)[rows].topk(k, dim=1).indices
    inside = by_block[rows[:, None], best].flatten(1)
    candidates = torch.cat([inside, logits[rows, head:]], dim=1)
    values, places = candidates.topk(k, dim=1)
    in_block = best.gather(1, (places // _BLOCK).clamp(max=k - 1)) * _BLOCK + places % _BLOCK
    in_tail = places - k * _BLOCK + head
    return values, torch.where(places < k * _BLOCK, in_block, in_tail)
