"""Running a head along a text and over the nodes of a tree behind it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..drafters.growing_stream import GrowingStream
from ..drafters.tree_growth import GrowthLimits
from .cache import HeadCache
from .head import EagleHead


class HeadStream(GrowingStream):
    """A head, its cache, and how far they have followed one text.

    The cache holds what was computed from the target's own features.

    Args:
        head: shared with other streams.
        limits: of a draft.
        chunk: most tokens run at once when following a text.
    """

    def __init__(self, head: EagleHead, limits: GrowthLimits, chunk: int = 512) -> None:
        super().__init__(head, head.config.feature_width, limits, chunk)
        self.head = head
        self.cache = HeadCache(head.config, head.device, head.dtype)
        self._last_hidden: Tensor | None = None
        self._above = torch.empty(0)
        self._next_position = 0
        self._known = 0

    def _follow(self, features: Tensor, token_ids: Tensor, position: int) -> None:
        count, known = len(features), self.cache.length
        mask = features.new_ones((count, known + count), dtype=torch.bool).tril(known)
        positions = torch.arange(position, position + count, device=features.device)
        hidden = self.head.fuse(features[None])
        output = self.head(hidden, token_ids[None], positions[None], mask, self.cache)
        self.cache.advance(count)
        self._last_hidden = output[:, -1:]
        self._next_position = position + count

    def _begin_draft(self) -> None:
        if self._last_hidden is None:
            raise RuntimeError("draft: expected `extend` to have been called before")
        self._known = self.cache.length

    def _forget_draft(self) -> None:
        self.cache.truncate(self._known)

    def root_logits(self) -> Tensor:
        assert self._last_hidden is not None
        self._above = self._last_hidden
        return self.head.logits(self._above)[0]

    def run(self, parent_rows: Tensor, token_ids: Tensor, depth: int, visible: Tensor) -> Tensor:
        """See `NodeRunner`; a head is fed its own output."""
        earlier = self.cache.length - (visible.shape[1] - len(parent_rows))
        known = visible.new_ones((len(parent_rows), earlier))
        self._above = self.head(
            self._above[:, parent_rows],
            token_ids[None],
            torch.full_like(parent_rows, self._next_position + depth - 1)[None],
            torch.cat([known, visible], dim=1),
            self.cache,
        )
        self.cache.advance(len(parent_rows))
        return self.head.logits(self._above)[0]
