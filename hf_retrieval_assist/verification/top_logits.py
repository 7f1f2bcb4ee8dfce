"""The largest logits behind the tokens of a forward, for drafters that learn from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..kernels.largest import largest

# Logits looked at together, so that a long prompt needs no large temporaries.
_CHUNK_CELLS = 1 << 25


class TopLogits:
    """The k largest logits of some tokens of a forward, and which tokens they are of.

    Args:
        logits: a tensor [m, vocab_size] of all tokens of the forward, in which they are found when
            asked for; or, where they were found together with it, float32 [m, k] on the host.
        places: int64 [n], ascending, which of the m tokens; None: all.
        ids: int64 [m, k] on the host, what was found; None: nothing yet.

    Attributes:
        free: whether looking at many nodes takes no more time than looking at few.
    """

    def __init__(
        self,
        logits: Any,
        places: NDArray[np.int64] | None = None,
        ids: NDArray[np.int64] | None = None,
    ):
        self.logits, self._ids = logits, ids
        self._places = np.arange(len(logits)) if places is None else places
        self.free = ids is not None or logits.device.type != "cpu"

    def __len__(self) -> int:
        """Tokens."""
        return len(self._places)

    def joined(self, others: Sequence[TopLogits]) -> TopLogits:
        """The tokens of this and of others of the same forward, behind one another."""
        if any(other.logits is not self.logits for other in others):
            raise ValueError("expected tokens of one forward")
        places = [self._places, *[other._places for other in others]]
        return TopLogits(self.logits, np.concatenate(places), self._ids)

    def of(
        self, nodes: NDArray[np.int64], k: int, vocab_size: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Token ids and logits [n, k] behind the given nodes (ascending), largest first.

        Columns from `vocab_size` on, which fill the logits up, are left out.
        """
        places = self._places[nodes]
        if self._ids is not None:
            return self._ids[places, :k].astype(np.int32), self.logits[places, :k]
        chunk = max(1, _CHUNK_CELLS // vocab_size)
        ids, values = np.empty((len(nodes), k), np.int32), np.empty((len(nodes), k), np.float32)
        for first in range(0, len(places), chunk):
            part = slice(first, first + chunk)
            best, found = largest(self.logits[:, :vocab_size], k, places[part])
            values[part], ids[part] = best.float().cpu().numpy(), found.cpu().numpy()
        return ids, values
