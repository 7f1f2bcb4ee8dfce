"""Drafts from a corpus on disk, as in REST.

He, Zhong, Cai, Lee, He: "REST: Retrieval-Based Speculative Decoding", 2023, sections 3.2 and 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..corpus.datastore import Datastore
from ..structures.draft_tree import path_products
from ..structures.suffix_array import SuffixMatcher
from ..system.arguments import require_at_least
from ..types.evidence import EvidenceClasses
from ..types.token_tree import Float32Array, TokenTree
from .base import Drafter, DraftSession, Feedbacks, Target, Tokens

# Nodes are told apart by tokens of context before them, their share of the occurrences of that
# context, and how many those are. Typical values of buckets stand for them in the priors.
_TYPICAL_SHARES = np.array([0.012, 0.055, 0.16, 0.36, 0.62, 0.86, 1.0])
_TYPICAL_COUNTS = np.array([1.0, 2.4, 7.0, 64.0])

# P(next token) = (its count - discount) / (count of the context + strength), as in the smoothing
# of n-gram models; one pair per bucket of context length. Fitted by maximum likelihood to 620,000
# nodes whose parent was accepted, on recorded outputs of chat, code, mathematics and SQL, weighted
# equally: a log loss of 0.22 nats, against 0.40 for relative frequencies and 0.21 for a free
# parameter in each of the 168 classes.
_DISCOUNTS = np.array([0.349, 0.588, 0.539, 0.340, 0.074, 0.018])
_STRENGTHS = np.array([13.27, 0.60, 0.06, 0.07, 0.06, 0.02])
_LEAST_PRIOR = 0.005


def _priors() -> Float32Array:
    """float32 [contexts, shares, counts]."""
    contexts = np.maximum(_TYPICAL_COUNTS, 1 / _TYPICAL_SHARES[:, None])
    hits = _TYPICAL_SHARES[:, None] * contexts - _DISCOUNTS[:, None, None]
    priors = hits / (contexts + _STRENGTHS[:, None, None])
    return np.maximum(priors, _LEAST_PRIOR).astype(np.float32)


_EVIDENCE = EvidenceClasses(
    _priors(), (2, 3, 5, 9, 16), (0.03, 0.1, 0.25, 0.5, 0.75, 0.95), (2, 4, 16)
)


@dataclass(eq=False)
class RestDrafter(Drafter):
    """Proposes what followed the longest suffix of the text that the datastore holds.

    Args:
        datastore: shared by all sessions.
        max_match: the longest suffix looked up, in tokens.
        max_nodes: the most nodes of a draft.
        continuation: the most tokens below the root.
        sources: match lengths that may contribute: the longest, then, if its continuations leave
            room, the next shorter ones with more occurrences. 1 is REST as published.

    Raises:
        ValueError: a setting below 1.
    """

    name = "rest"
    origins = ("corpus",)
    evidence = _EVIDENCE

    datastore: Datastore
    max_match: int = 16
    max_nodes: int = 64
    continuation: int = 10
    sources: int = 3

    def __post_init__(self) -> None:
        require_at_least(1, max_match=self.max_match, max_nodes=self.max_nodes)
        require_at_least(1, continuation=self.continuation, sources=self.sources)

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> RestSession:
        """A session for a prompt; ValueError when the datastore has another vocabulary.

        A token of the text takes O(max_match log(tokens)).
        """
        self.datastore.check_vocabulary(target.vocab_size)
        matcher = SuffixMatcher(self.datastore.index, self.max_match, self.max_nodes)
        # No token before these can be part of a match.
        matcher.extend(prompt_ids[-self.max_match :].tolist())
        return RestSession(matcher, self.datastore)

    def propose(
        self, sessions: Sequence[RestSession], budgets: Sequence[int]
    ) -> Sequence[TokenTree]:
        pairs = zip(sessions, budgets, strict=True)
        return [self._tree(session.matcher, min(most, self.max_nodes)) for session, most in pairs]

    def _tree(self, matcher: SuffixMatcher, most: int) -> TokenTree:
        """The most frequent continuations."""
        found = matcher.select(most, self.continuation, self.sources)
        token_ids, parents, counts, parent_counts, contexts = found
        classes = _EVIDENCE.of(contexts, counts / parent_counts, parent_counts)
        probs = path_products(parents, _EVIDENCE.priors[classes])
        return TokenTree(token_ids, parents, probs, classes)

    def commit(self, sessions: Sequence[RestSession], tokens: Tokens, feedbacks: Feedbacks) -> None:
        for session, token_ids in zip(sessions, tokens, strict=True):
            session.matcher.extend(np.array(token_ids, np.int32))


@dataclass(eq=False)
class RestSession(DraftSession):
    """A text, and where the datastore holds the longest of its ends."""

    matcher: SuffixMatcher
    datastore: Datastore
