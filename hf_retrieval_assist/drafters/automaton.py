"""Drafts from suffix automata: SAM-Decoding (Hu et al., 2024), sections 3.1 to 3.3.

One automaton grows over the prompt and the output of each session, another one is built once over
a corpus and shared. Both match the longest suffix of the text at O(1) a token and draft what stood
after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..structures import draft_tree, evidence
from ..structures.suffix_automaton import Cursor, SuffixAutomaton
from ..system.arguments import require_at_least
from ..token_tree import Float32Array, Int32Array, TokenTree
from .automaton_priors import CHAIN_PRIORS, TREE_PRIORS
from .base import Drafter, DraftSession, Feedback, Target

LONGEST = 64  # matches and depths beyond are all alike


def _bucket_of(upper_bounds: Sequence[int], size: int = LONGEST + 1) -> Int32Array:
    """int32 [size], index of the first bound that is not below each of 0 .. size − 1."""
    return np.searchsorted(upper_bounds, np.arange(size)).astype(np.int32)


# Evidence of a chain: tokens matched, depth, and whether the match has one earlier occurrence or
# several (then they may have gone on differently).
CHAIN_MATCHES = _bucket_of([1, 2, 3, 4, 6, 8, 12, 20])
CHAIN_DEPTHS = _bucket_of([1, 2, 4, 8, 16])
# Evidence of a counted node: tokens matched up to its parent, and the share of the parent's
# occurrences that go on with it, in steps of 1/20. A parent that occurred only once goes apart: its
# share of 1 says little.
TREE_MATCHES = _bucket_of([1, 2, 4, 8, 16, 32])
TREE_RATES = _bucket_of([0, 1, 3, 7, 11, 15, 19, 20], 22)

Tokens = Sequence[int] | NDArray[np.integer]


class _ChainTable:
    """Classes and path probabilities of chains by match length and uniqueness, computed once."""

    def __init__(self, priors: Float32Array, max_draft: int) -> None:
        depths = CHAIN_DEPTHS[np.minimum(np.arange(1, max_draft + 1), LONGEST)]
        n_depths = int(CHAIN_DEPTHS[-1]) + 1
        rows = np.arange(2 * (int(CHAIN_MATCHES[-1]) + 1), dtype=np.int32)
        self.classes = np.ascontiguousarray(rows[:, None] * n_depths + depths)
        self.probs = np.cumprod(priors[self.classes], axis=1, dtype=np.float32)
        self.parents = np.arange(-1, max_draft - 1, dtype=np.int32)

    def chain(self, token_ids: Int32Array, length: int, unique: bool) -> TokenTree:
        n = len(token_ids)
        row = 2 * int(CHAIN_MATCHES[min(length, LONGEST)]) + unique
        return TokenTree(token_ids, self.parents[:n], self.probs[row, :n], self.classes[row, :n])


class _AutomatonSession(DraftSession):
    """What both kinds of session share: a cursor over an automaton."""

    def __init__(self, cursor: Cursor, vocab_size: int) -> None:
        self._cursor = cursor
        self._vocab_size = vocab_size

    @property
    def match_length(self) -> int:
        """Tokens at the end of the text that the automaton has met (elsewhere)."""
        return self._cursor.length


class AutomatonSession(_AutomatonSession):
    """Drafts from the text's own past."""

    def __init__(self, drafter: AutomatonDrafter, prompt_ids: Int32Array, target: Target) -> None:
        self._automaton = SuffixAutomaton(capacity=len(prompt_ids))
        super().__init__(self._automaton.cursor(), target.vocab_size)
        self._drafter = drafter
        for expected in target.expected:
            self._automaton.extend(expected)
            self._automaton.end_document()
        self._automaton.extend(prompt_ids, self._cursor)
        texts = (prompt_ids, *target.expected)
        self._foreign_ids = max(int(ids.max(initial=0)) for ids in texts) >= target.vocab_size

    def propose(self, budget: int) -> TokenTree:
        """A chain after the latest (or earliest) occurrence of the longest match."""
        drafter, cursor = self._drafter, self._cursor
        if cursor.length < drafter.min_match or budget <= 0:
            return TokenTree.empty()
        tokens = cursor.draft(min(budget, drafter.max_draft), latest=drafter.latest)
        if self._foreign_ids:
            tokens = self._proposable(tokens)
        return drafter.table.chain(tokens, cursor.length, cursor.earliest == cursor.latest)

    def _proposable(self, tokens: Int32Array) -> Int32Array:
        """The tokens before the first that only a prompt can hold (no row of the output layer)."""
        foreign = np.flatnonzero(tokens >= self._vocab_size)
        return tokens[: foreign[0]] if len(foreign) else tokens

    def commit(self, token_ids: Sequence[int], feedback: Feedback | None) -> None:
        self._automaton.extend(token_ids, self._cursor)


class AutomatonDrafter(Drafter):
    """Drafts what followed the longest earlier match in the prompt and output of the session.

    Args:
        max_draft: the longest draft; SAM-Decoding's 40.
        min_match: draft nothing from shorter matches.
        latest: draft from a late occurrence instead of the earliest, which is SAM-Decoding's.

    Raises:
        ValueError: max_draft or min_match below 1.
    """

    name = "automaton"
    origins = ("text",)

    def __init__(self, max_draft: int = 40, min_match: int = 1, latest: bool = True) -> None:
        require_at_least(1, max_draft=max_draft, min_match=min_match)
        self.max_draft = max_draft
        self.min_match = min_match
        self.latest = latest
        self.table = _ChainTable(self.priors(), max_draft)

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> AutomatonSession:
        return AutomatonSession(self, prompt_ids, target)

    def priors(self) -> Float32Array:
        return CHAIN_PRIORS


class StaticAutomatonSession(_AutomatonSession):
    """Drafts from a corpus; only the cursor belongs to the session."""

    def __init__(
        self, drafter: StaticAutomatonDrafter, prompt_ids: Int32Array, target: Target
    ) -> None:
        super().__init__(drafter.automaton.cursor(), target.vocab_size)
        self._drafter = drafter
        self._cursor.advance_all(prompt_ids)

    def propose(self, budget: int) -> TokenTree:
        """The most frequent continuations of the longest match, best first."""
        drafter, cursor = self._drafter, self._cursor
        if cursor.length < drafter.min_match or budget <= 0:
            return TokenTree.empty()
        tokens, parents, rates, counts = cursor.draft_tree(
            min(budget, drafter.max_draft), drafter.max_children, drafter.min_prob
        )
        classes = evidence.share_classes(
            parents, rates, counts, cursor.length, TREE_MATCHES, TREE_RATES
        )
        probs = draft_tree.path_products(parents, TREE_PRIORS[classes])
        return TokenTree(tokens, parents, probs, classes)

    def commit(self, token_ids: Sequence[int], feedback: Feedback | None) -> None:
        self._cursor.advance_all(token_ids)


class StaticAutomatonDrafter(Drafter):
    """Drafts what followed the longest match in a corpus, as a tree weighed by counts.

    The corpus is indexed once and only read afterwards, by any number of sessions and threads.

    Args:
        corpus: documents as sequences of token ids; no match and no draft crosses them.
        max_draft: the most nodes of a draft.
        min_match: draft nothing from shorter matches.
        max_children: the most children of a node; 1 gives a chain.
        min_prob: nodes with a smaller share of the match's occurrences are left out.

    Raises:
        ValueError: the corpus holds no token, or bad ids; max_draft, min_match or max_children
            below 1. From `start`: the corpus holds an id that the target's vocabulary does not.
    """

    name = "corpus automaton"
    origins = ("corpus",)

    def __init__(
        self,
        corpus: Iterable[Tokens],
        max_draft: int = 40,
        min_match: int = 1,
        max_children: int = 8,
        min_prob: float = 0.0,
    ) -> None:
        require_at_least(1, max_draft=max_draft, min_match=min_match, max_children=max_children)
        self.max_draft = max_draft
        self.min_match = min_match
        self.max_children = max_children
        self.min_prob = min_prob
        self.automaton = _index(corpus)
        self._largest_id = int(self.automaton.tokens().max(initial=-1))
        if self._largest_id < 0:
            raise ValueError("corpus: expected at least one token, got none")

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> StaticAutomatonSession:
        if self._largest_id >= target.vocab_size:
            raise ValueError(
                f"corpus: expected ids below the vocabulary size {target.vocab_size}, "
                f"got {self._largest_id}"
            )
        return StaticAutomatonSession(self, prompt_ids, target)

    def priors(self) -> Float32Array:
        return TREE_PRIORS


def _index(corpus: Iterable[Tokens]) -> SuffixAutomaton:
    automaton = SuffixAutomaton(refresh=0)
    for i, document in enumerate(corpus):
        try:
            automaton.extend(document)
        except (TypeError, ValueError) as error:
            raise type(error)(f"corpus: document {i}: {error}") from error
        automaton.end_document()
    automaton.freeze()
    return automaton
