"""REST (He et al., 2023, https://arxiv.org/abs/2311.08252)."""

from __future__ import annotations

from dataclasses import dataclass

from ..corpus.datastore import Datastore
from ..drafters.rest import RestDrafter


@dataclass(frozen=True)
class Rest:
    """The continuations of the longest match, the most frequent ones first (sections 3.2 and 3.3).

    Sizes are those of :class:`RestDrafter`.
    """

    max_match: int = 16
    max_nodes: int = 64
    continuation: int = 10

    def drafter(self, datastore: Datastore) -> RestDrafter:
        """Of the longest match alone; its draft is verified whole."""
        return RestDrafter(datastore, self.max_match, self.max_nodes, self.continuation, sources=1)
