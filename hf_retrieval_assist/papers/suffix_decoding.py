"""SuffixDecoding (Oliaro et al., 2024, https://arxiv.org/abs/2411.04975)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from ..draft_models.fallbacks import Fallback, fallback_drafters
from ..drafters.base import DraftSession
from ..drafters.suffix import SuffixDrafter
from ..memory.output_memory import OutputMemory
from ..policy.policy import Options, union
from ..presets import require, shows_arguments
from ..types.token_tree import TokenTree
from .paper import Paper


class SuffixDecoding(Paper):
    """Algorithm 1 drafts from the match of the highest SCORE, in the text's tree or the outputs'.

    The fallback drafts where SCORE is low (the paper's hybrid).

    Args:
        memory: earlier outputs to draft from, and to teach; None for a new one, at hand as
            `assistant.memory`.
        max_depth: longest match plus draft, in tokens.
        alpha: nodes for each matched token, at most.
        min_prob: no node is drafted that is estimated to be less probable.
        tree: draft trees; otherwise single paths.
        fallback: as for :class:`~hf_retrieval_assist.presets.SamAssistant`.
        threshold: SCORE from which on the trees draft; None: the number of tokens that the
            fallback's draft is expected to bring.

    Raises:
        ValueError: a size, a probability or the threshold is out of range.
    """

    @shows_arguments
    def __init__(
        self,
        memory: OutputMemory | None = None,
        max_depth: int = 64,
        alpha: float = 4.0,
        min_prob: float = 0.02,
        tree: bool = True,
        fallback: Fallback = "token_recycling",
        threshold: float | None = None,
        **options: Unpack[Options],
    ):
        if threshold is not None and not threshold >= 0:
            raise ValueError(f"threshold: expected None or at least 0, got {threshold}")
        if memory is not None:
            require(OutputMemory, memory=memory)
        self.threshold = threshold
        drafter = SuffixDrafter(memory, max_depth, alpha, min_prob, tree, scored=True)
        self.memory = drafter.memory
        super().__init__([drafter, *fallback_drafters(fallback, self.memory)], **options)

    def choose(self, sessions: Sequence[DraftSession], drafts: Sequence[TokenTree]) -> TokenTree:
        suffix: Any = sessions[0]
        fallback = union(drafts[1:])
        threshold = fallback.expected_tokens if self.threshold is None else self.threshold
        return drafts[0] if suffix.score >= threshold or not len(fallback) else fallback
