"""SuffixDecoding (Oliaro et al., 2024, https://arxiv.org/abs/2411.04975)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..drafters.base import DraftSession
from ..drafters.suffix import SuffixDrafter
from ..drafting.policy import union
from ..memory.output_memory import OutputMemory
from ..token_tree import TokenTree


@dataclass(frozen=True)
class SuffixDecoding:
    """Algorithm 1 drafts from the match of the highest SCORE, in the text's tree or the outputs'.

    The fallback drafts where SCORE is low (the paper's hybrid).

    Further parameters are those of :class:`SuffixDrafter`.

    Attributes:
        threshold: SCORE from which on the trees draft; None: the number of tokens that the
            fallback's draft is expected to bring.

    Raises:
        ValueError: a value is out of range; the others' from `drafter`.
    """

    max_depth: int = 64
    alpha: float = 4.0
    min_prob: float = 0.02
    tree: bool = True
    threshold: float | None = None

    def __post_init__(self) -> None:
        if self.threshold is not None and not self.threshold >= 0:
            raise ValueError(f"threshold: expected None or at least 0, got {self.threshold}")

    def drafter(self, memory: OutputMemory | None) -> SuffixDrafter:
        """Of the text and of earlier outputs."""
        return SuffixDrafter(
            memory, self.max_depth, self.alpha, self.min_prob, self.tree, scored=True
        )

    def choose(self, sessions: Sequence[DraftSession], drafts: Sequence[TokenTree]) -> TokenTree:
        """The draft to verify, the first one being the `drafter`'s."""
        suffix: Any = sessions[0]
        fallback = union(drafts[1:])
        threshold = fallback.expected_tokens if self.threshold is None else self.threshold
        return drafts[0] if suffix.score >= threshold or not len(fallback) else fallback
