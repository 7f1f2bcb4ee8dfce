"""Streams of hidden states whose drafts are grown level by level."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from ..token_tree import TokenTree
from .tree_growth import GrowthLimits, grow


class DraftingLayers(Protocol):
    """What drafts: an EAGLE head, or MTP layers."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Ids of the target's vocabulary for columns of the logits; any shape."""


class GrowingStream(ABC):
    """A `FeatureStream`, and the `NodeRunner` of its drafts.

    What a draft writes behind the text is forgotten when it is done.

    Args:
        layers: shared with other streams.
        feature_width: of what `extend` takes.
        limits: of a draft.
        chunk: most tokens run at once when following a text.
    """

    def __init__(
        self, layers: DraftingLayers, feature_width: int, limits: GrowthLimits, chunk: int
    ) -> None:
        self._layers = layers
        self.feature_width = feature_width
        self.limits = limits
        self.chunk = chunk

    @torch.inference_mode()
    def extend(self, features: Tensor, token_ids: Tensor, first_position: int) -> None:
        """Follow the text by m tokens; see `FeatureStream`."""
        features = features.to(self._layers.device, self._layers.dtype)
        token_ids = token_ids.to(self._layers.device)
        for start in range(0, len(features), self.chunk):
            part = slice(start, start + self.chunk)
            self._follow(features[part], token_ids[part], first_position + start)

    @torch.inference_mode()
    def draft(self, keep: int) -> TokenTree:
        """The best-first tree below the last token of the text."""
        self._begin_draft()
        try:
            return grow(self, self.limits, keep).tree()
        finally:
            self._forget_draft()

    @abstractmethod
    def _follow(self, features: Tensor, token_ids: Tensor, position: int) -> None:
        """Follow the text by at most `chunk` tokens; `position` is that of the first feature."""

    @abstractmethod
    def _begin_draft(self) -> None:
        """Before the first level."""

    @abstractmethod
    def _forget_draft(self) -> None:
        """Leave what `_begin_draft` found."""

    @abstractmethod
    def root_logits(self) -> Tensor:
        """See `NodeRunner`."""

    @abstractmethod
    def run(self, parent_rows: Tensor, token_ids: Tensor, depth: int, visible: Tensor) -> Tensor:
        """See `NodeRunner`."""

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """See `NodeRunner`."""
        return self._layers.to_target_ids(draft_ids)
