"""Sequoia (Chen et al., 2024, https://arxiv.org/abs/2402.12374)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..draft_models.draft_model import DraftModelDrafter


@dataclass(frozen=True)
class Sequoia:
    """A small model's tree, of the shape that brings the most tokens a second.

    The shape is solved by dynamic programming for the measured acceptance by rank (section 4.1),
    its size for the measured times (section 4.3). With a temperature, children are drawn without
    replacement and verified by residual sampling (section 4.2, algorithm 2). Sizes and the
    temperature are those of :class:`DraftModelDrafter`.
    """

    temperature: float | None = None
    max_nodes: int = 63
    max_levels: int = 8
    width: int = 8

    def drafter(self, draft_model: Any) -> DraftModelDrafter:
        """Whose draft is verified whole."""
        return DraftModelDrafter(
            draft_model,
            max_nodes=self.max_nodes,
            max_levels=self.max_levels,
            width=self.width,
            temperature=self.temperature,
        )
