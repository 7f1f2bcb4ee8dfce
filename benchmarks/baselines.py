"""What a user could run instead: transformers' prompt lookup, as a drafter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from hf_retrieval_assist import Assistant, TokenTree
from hf_retrieval_assist.drafters.base import Drafter, DraftSession, Feedback, Target

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

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> DraftSession:
        return _LookupSession(prompt_ids, self._tokens)


class _LookupSession(DraftSession):
    def __init__(self, prompt_ids: NDArray[np.int32], tokens: int) -> None:
        self._ids = prompt_ids.astype(np.int64)
        self._generator = PromptLookupCandidateGenerator(
            num_output_tokens=tokens,
            max_matching_ngram_size=LOOKUP_NGRAM,
            max_length=2**31,
        )

    def propose(self, budget: int) -> TokenTree:
        ids = torch.from_numpy(self._ids)[None]
        drafted = self._generator.get_candidates(ids)[0][0, len(self._ids) :].tolist()
        return TokenTree.chain(drafted[:budget], np.ones(len(drafted[:budget])))

    def commit(self, token_ids: Sequence[int], feedback: Feedback | None) -> None:
        self._ids = np.concatenate([self._ids, np.asarray(token_ids, dtype=np.int64)])


def prompt_lookup(tokens: int = LOOKUP_TOKENS) -> Assistant:
    """An assistant that verifies whatever prompt lookup drafts, as transformers does."""
    return Assistant([PromptLookupDrafter(tokens)], budget=tokens)
