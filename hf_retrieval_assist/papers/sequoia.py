"""Sequoia (Chen et al., 2024, https://arxiv.org/abs/2402.12374)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from transformers import PreTrainedModel

from ..assistants import Assistant
from ..draft_models.draft_model import DraftModelDrafter
from ..drafters.base import Drafter
from ..policy.policy import DraftingPolicy, Options
from ..policy.step import DraftedStep
from ..presets import require
from ..types.token_tree import Forest
from .paper import PaperPolicy


class SequoiaPolicy(PaperPolicy):
    """Grow the optimal tree with the draft model, level by level, and verify all of it; children
    are drawn without replacement and verified by residual sampling, or are the likeliest ones."""

    def propose(self, step: DraftedStep, budget: int) -> Forest:
        return self.ask(0, step, budget)


class Sequoia(Assistant):
    """Drafts optimal trees of a small model.

    The tree's shape is solved by dynamic programming for the acceptance by rank; children are drawn
    without replacement, and verified by sampling from the residual distributions.

    Differences: the acceptance by rank is measured while drafting, where the paper measures it
    beforehand; the tree has `nodes` nodes, where the paper also solves its size for the hardware:
    `SamAssistant(fallback=draft_model)` does so.

    Args:
        draft_model: a transformers model with the target's vocabulary.
        temperature: of the draws, where the target samples; output keeps its distribution but not
            its seed. None takes each node's likeliest tokens, for greedy decoding, and keeps the
            seed.
        nodes: of a draft.
        levels: forwards of the draft model for one draft.
        width: children of a node at most.

    Raises:
        ValueError: a bad size; from `generate`, another vocabulary than the target's.
        TypeError: what is no model.
    """

    def __init__(
        self,
        draft_model: PreTrainedModel,
        temperature: float | None = None,
        nodes: int = 63,
        levels: int = 8,
        width: int = 8,
        **options: Unpack[Options],
    ):
        require(torch.nn.Module, draft_model=draft_model)
        sizes = {"max_nodes": nodes, "max_levels": levels, "width": width}
        drafter = DraftModelDrafter(draft_model, temperature=temperature, **sizes)
        residual = temperature is not None
        super().__init__([drafter], budget=nodes, residual=residual, **options)

    def _policy(self, drafters: Sequence[Drafter], **options: Any) -> DraftingPolicy:
        return SequoiaPolicy(drafters, **options)
