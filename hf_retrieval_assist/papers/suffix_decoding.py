"""SuffixDecoding (Oliaro et al., 2024, https://arxiv.org/abs/2411.04975)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..drafters.base import DraftSession
from ..policy.policy import union
from ..types.token_tree import TokenTree

# Arguments of a `SuffixDrafter` that drafts by Algorithm 1.
ALGORITHM_1 = {"alpha": 4.0, "min_prob": 0.02, "scored": True}


@dataclass(frozen=True)
class SuffixDecoding:
    """Algorithm 1 drafts from the match of the highest SCORE, in the text's tree or the outputs'.

    The fallback drafts where SCORE is low (the paper's hybrid).

    Attributes:
        threshold: SCORE from which on the trees draft; None: the number of tokens that the
            fallback's draft is expected to bring.

    Raises:
        ValueError: the threshold is out of range.
    """

    threshold: float | None = None

    def __post_init__(self) -> None:
        if self.threshold is not None and not self.threshold >= 0:
            raise ValueError(f"threshold: expected None or at least 0, got {self.threshold}")

    def choose(self, sessions: Sequence[DraftSession], drafts: Sequence[TokenTree]) -> TokenTree:
        """The draft to verify, the first one being Algorithm 1's."""
        suffix: Any = sessions[0]
        fallback = union(drafts[1:])
        threshold = fallback.expected_tokens if self.threshold is None else self.threshold
        return drafts[0] if suffix.score >= threshold or not len(fallback) else fallback
