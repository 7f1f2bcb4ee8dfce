"""What a user could run instead: transformers' prompt lookup, as a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from hf_retrieval_assist import Assistant, TokenTree
from hf_retrieval_assist.drafters.base import Drafter, DraftSession, Feedbacks, Target, Tokens

LOOKUP_TOKENS = 10
LOOKUP_NGRAM = 2


class PromptLookupDrafter(Drafter):
    """transformers' own candidate generator with its default n-grams, so that it meets the same
    verifier and the same counting as ours.

    Args:
        tokens: the longest draft.
    """

    name = "prompt lookup"

    def __init__(self, tokens: int = LOOKUP_TOKENS) -> None:
        self._tokens = tokens

        self._generator = PromptLookupCandidateGenerator(
            num_output_tokens=tokens,
            max_matching_ngram_size=LOOKUP_NGRAM,
            max_length=2**31,
        )

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> _LookupSession:
        return _LookupSession(prompt_ids.astype(np.int64))

    def propose(
        self, sessions: Sequence[_LookupSession], budgets: Sequence[int]
    ) -> Sequence[TokenTree]:
        pairs = zip(sessions, budgets, strict=True)
        return [self._draft(session.ids, budget) for session, budget in pairs]

    def _draft(self, ids: NDArray[np.int64], budget: int) -> TokenTree:
        found = self._generator.get_candidates(torch.from_numpy(ids)[None])[0]
        drafted = found[0, len(ids) :].tolist()[:budget]
        return TokenTree.chain(drafted, np.ones(len(drafted)))

    def commit(
        self, sessions: Sequence[_LookupSession], tokens: Tokens, feedbacks: Feedbacks
    ) -> None:
        for session, token_ids in zip(sessions, tokens, strict=True):
            session.ids = np.concatenate([session.ids, np.asarray(token_ids, dtype=np.int64)])


@dataclass
class _LookupSession(DraftSession):
    """A text, int64 [length]."""

    ids: NDArray[np.int64]


def prompt_lookup(tokens: int = LOOKUP_TOKENS) -> Assistant:
    """An assistant that verifies whatever prompt lookup drafts, as transformers does."""
    return Assistant([PromptLookupDrafter(tokens)], budget=tokens)
