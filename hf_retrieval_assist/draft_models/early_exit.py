"""Drafts of the target's own first layers."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..drafters.base import Drafter, Target
from ..host.first_layers import first_layers
from ..system.arguments import require_at_least
from ..system.locks import Lock
from ..token_tree import Float32Array, Forest
from .draft_model import DraftModelDrafter, DraftModelSession
from .sequoia import PRIORS


class EarlyExit(Drafter):
    """Drafts by leaving the target early: its first layers, final norm and output layer.

    Worth it with models that were trained for it (Elhoushi et al. 2024, LayerSkip,
    arXiv:2404.16710); right with all. It needs no second model, and keeps a cache of its own.

    Args:
        layer: how many layers are run.
        **sizes: of :class:`~hf_retrieval_assist.draft_models.draft_model.DraftModelDrafter`.

    Raises:
        ValueError: from `start`, the target does not have more layers than that, or cannot be fed
            token trees.
    """

    name = "early exit"
    costly = True

    def __init__(self, layer: int, **sizes: Any) -> None:
        require_at_least(1, layer=layer)
        self.layer = layer
        self._sizes = sizes
        self._drafters = weakref.WeakKeyDictionary[Any, DraftModelDrafter]()
        self._lock = Lock()

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> DraftModelSession:
        model = target.require_model("EarlyExit")
        return self._drafter_of(model).start(prompt_ids, target)

    def propose_rows(self, sessions: Sequence[DraftModelSession], budgets: Sequence[int]) -> Forest:
        return sessions[0].drafter.propose_rows(sessions, budgets)

    def _drafter_of(self, model: Any) -> DraftModelDrafter:
        with self._lock:
            if model not in self._drafters:
                shallow = first_layers(model, self.layer)
                self._drafters[model] = DraftModelDrafter(shallow, **self._sizes)
            return self._drafters[model]

    def priors(self) -> Float32Array:
        """As for any draft model."""
        return PRIORS
