"""Running a head along a text and over the nodes of a tree behind it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..drafters.tree_growth import GrowthLimits, grow
from ..token_tree import TokenTree
from .cache import HeadCache
from .head import EagleHead


class HeadStream:
    """A head, its cache, and how far they have followed one text.

    The cache holds what was computed from the target's own features; a draft writes behind that
    and is forgotten when it is done.

    Args:
        head: shared with other streams.
        limits: of a draft.
        chunk: most tokens run at once when following a text.
    """

    def __init__(self, head: EagleHead, limits: GrowthLimits, chunk: int = 512) -> None:
        self.head = head
        self.limits = limits
        self.chunk = chunk
        self.feature_width = head.config.feature_width
        self.cache = HeadCache(head.config, head.device, head.dtype)
        self._last_hidden: Tensor | None = None
        self._above = torch.empty(0)
        self._next_position = 0

    @torch.inference_mode()
    def extend(self, features: Tensor, token_ids: Tensor, first_position: int) -> None:
        """Follow the text by m tokens; see `FeatureStream`."""
        features = features.to(self.head.device, self.head.dtype)
        token_ids = token_ids.to(self.head.device)
        for start in range(0, len(features), self.chunk):
            part = slice(start, start + self.chunk)
            self._follow(features[part], token_ids[part], first_position + start)

    def _follow(self, features: Tensor, token_ids: Tensor, position: int) -> None:
        count, known = len(features), self.cache.length
        mask = features.new_ones((count, known + count), dtype=torch.bool).tril(known)
        positions = torch.arange(position, position + count, device=features.device)
        hidden = self.head.fuse(features[None])
        output = self.head(hidden, token_ids[None], positions[None], mask, self.cache)
        self.cache.advance(count)
        self._last_hidden = output[:, -1:]
        self._next_position = position + count

    @torch.inference_mode()
    def draft(self, keep: int) -> TokenTree:
        """The tree of EAGLE-2 below the last token of the text.

        Raises:
            RuntimeError: the stream has not followed any text yet.
        """
        if self._last_hidden is None:
            raise RuntimeError("draft: expected `extend` to have been called before")
        known = self.cache.length
        try:
            return grow(self, self.limits, keep).tree()
        finally:
            self.cache.truncate(known)

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

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return self.head.to_target_ids(draft_ids.to(self.head.device))
