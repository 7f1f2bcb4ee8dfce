"""Drafts from suffix automata: SAM-Decoding (Hu et al., 2024), sections 3.1 to 3.3.

One automaton grows over the prompt and the output of each session, another one is built once over
a corpus and shared. Both match the longest suffix of the text at O(1) a token and draft what stood
after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..structures.draft_tree import path_products
from ..structures.suffix_automaton import Cursor, SuffixAutomaton
from ..system.arguments import require_at_least
from ..types.evidence import EvidenceClasses
from ..types.passages import Documents, OwnText, Source
from ..types.token_tree import Ids, Int32Array, NamedIds, TokenTree, checked_documents
from .base import Drafter, DraftSession, Feedback, Target

# Priors are measured: the share of drafted nodes that the recorded text went on
# with, among those whose parents it went on with. Real chat, programs, worked mathematics, SQL and
# file edits; a kind of text counts at most a thousand nodes per class, and thin classes are drawn
# towards the next shorter match.

# A chain's nodes are told apart by tokens matched, whether the match has one earlier occurrence or
# several, which may have gone on differently, and depth.
_CHAIN = EvidenceClasses(
    [
        [[0.272, 0.469, 0.539, 0.616, 0.726, 0.811], [0.347, 0.489, 0.565, 0.727, 0.811, 0.926]],
        [[0.393, 0.514, 0.551, 0.660, 0.769, 0.856], [0.445, 0.558, 0.641, 0.791, 0.927, 0.983]],
        [[0.484, 0.599, 0.621, 0.706, 0.849, 0.942], [0.503, 0.610, 0.665, 0.816, 0.923, 0.982]],
        [[0.525, 0.603, 0.722, 0.765, 0.814, 0.974], [0.559, 0.670, 0.666, 0.867, 0.928, 0.990]],
        [[0.642, 0.679, 0.732, 0.822, 0.804, 0.949], [0.642, 0.731, 0.705, 0.884, 0.927, 0.981]],
        [[0.701, 0.700, 0.759, 0.722, 0.860, 0.977], [0.718, 0.755, 0.814, 0.861, 0.943, 0.980]],
        [[0.757, 0.784, 0.782, 0.708, 0.859, 0.958], [0.807, 0.882, 0.845, 0.818, 0.929, 0.974]],
        [[0.788, 0.768, 0.776, 0.689, 0.859, 0.958], [0.836, 0.833, 0.806, 0.879, 0.970, 0.997]],
        [[0.831, 0.815, 0.851, 0.844, 0.928, 0.939], [0.992, 0.987, 0.993, 0.995, 0.996, 0.994]],
    ],
    *((2, 3, 4, 5, 7, 9, 13, 21), (1,), (2, 3, 5, 9, 17)),
)
# float32 [matches, shares + 1], the last one of parents that occurred once.
_TREE_RATES = np.array(
    [
        [0.026, 0.047, 0.087, 0.139, 0.200, 0.439, 0.660, 0.355, 0.133],
        [0.025, 0.053, 0.095, 0.160, 0.233, 0.382, 0.706, 0.596, 0.237],
        [0.026, 0.049, 0.081, 0.149, 0.235, 0.416, 0.718, 0.753, 0.370],
        [0.041, 0.051, 0.089, 0.153, 0.270, 0.440, 0.729, 0.806, 0.572],
        [0.023, 0.049, 0.071, 0.133, 0.264, 0.505, 0.841, 0.935, 0.816],
        [0.023, 0.041, 0.086, 0.210, 0.301, 0.495, 0.768, 0.969, 0.898],
        [0.023, 0.041, 0.086, 0.310, 0.318, 0.498, 0.765, 0.971, 0.971],
    ],
    np.float32,
)
# Counted nodes are told apart by tokens matched up to the parent, the share of the parent's
# occurrences that go on with them, and whether those are several: if not, a share of 1 says little.
_TREE = EvidenceClasses(
    np.stack(np.broadcast_arrays(_TREE_RATES[:, -1:], _TREE_RATES[:, :-1]), axis=2),
    *((2, 3, 5, 9, 17, 33), (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0), (2,)),
)


def counted_tree(found: tuple[NDArray[Any], ...], evidence: EvidenceClasses) -> TokenTree:
    """What a structure that counts has selected (see `SuffixMatcher.select`), as a draft.

    Args:
        evidence: by the context's length, a node's share of its parent's occurrences, and these.
    """
    token_ids, parents, counts, parent_counts, contexts = found
    classes = evidence.of(contexts, counts / parent_counts, parent_counts)
    return TokenTree(token_ids, parents, path_products(parents, evidence.priors[classes]), classes)


@dataclass(eq=False)
class MatchSession(DraftSession):
    """A text, and where a structure holds the longest of its ends.

    Attributes:
        length: tokens of that end.
        extend: goes on with tokens of the text.
        draft: at most so many nodes behind the match.
        source: what the structure holds, by origin.
    """

    length: Callable[[], int]
    extend: Callable[[Int32Array], object]
    draft: Callable[[int], TokenTree]
    source: Mapping[str, Source]

    @property
    def match_length(self) -> int:
        """Tokens at the end of the text that the structure holds elsewhere."""
        return self.length()

    def propose(self, budget: int) -> TokenTree:
        return self.draft(budget)

    def commit(self, token_ids: Sequence[int], feedback: Feedback | None) -> None:
        self.extend(np.array(token_ids, np.int32))

    def sources(self) -> Mapping[str, Source]:
        return self.source


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
    evidence = _CHAIN

    def __init__(self, max_draft: int = 40, min_match: int = 1, latest: bool = True) -> None:
        require_at_least(1, max_draft=max_draft, min_match=min_match)
        self.max_draft = max_draft
        self.min_match = min_match
        self.latest = latest

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> MatchSession:
        automaton = SuffixAutomaton(capacity=len(prompt_ids))
        cursor = automaton.cursor()
        for expected in target.expected:
            automaton.extend(expected)
            automaton.end_document()
        automaton.extend(np.ascontiguousarray(prompt_ids, np.int32), cursor)
        return MatchSession(
            lambda: cursor.length,
            partial(automaton.extend, cursor=cursor),
            partial(self._chain, cursor, target.vocab_size),
            {"text": OwnText(target.expected, len(prompt_ids))},
        )

    def _chain(self, cursor: Cursor, vocab_size: int, budget: int) -> TokenTree:
        """What followed the latest (or earliest) occurrence."""
        if cursor.length < self.min_match or budget <= 0:
            return TokenTree.empty()
        tokens = cursor.draft(min(budget, self.max_draft), latest=self.latest)
        # Only a prompt, or an expected text, holds ids that the output layer has no row for.
        foreign = np.flatnonzero(tokens >= vocab_size)
        tokens = tokens[: foreign[0]] if len(foreign) else tokens
        depths = np.arange(1, len(tokens) + 1)
        classes = _CHAIN.of(cursor.length, cursor.earliest == cursor.latest, depths)
        probs = np.cumprod(_CHAIN.priors[classes], dtype=np.float32)
        return TokenTree.chain(tokens, probs, classes)


@dataclass(frozen=True)
class _Indexed(Documents):
    """The documents of an automaton: their names, where they begin, and how long they are."""

    _automaton: SuffixAutomaton
    _documents: Sequence[tuple[str, int, int]]

    def documents(self, text: Int32Array) -> Iterable[NamedIds]:
        tokens = self._automaton.tokens()
        return [NamedIds(name, tokens[at : at + n]) for name, at, n in self._documents]


@dataclass(eq=False)
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
    evidence = _TREE

    corpus: InitVar[Iterable[Ids | NamedIds]]
    max_draft: int = 40
    min_match: int = 1
    max_children: int = 8
    min_prob: float = 0.0

    def __post_init__(self, corpus: Iterable[Ids | NamedIds]) -> None:
        require_at_least(1, max_draft=self.max_draft, min_match=self.min_match)
        require_at_least(1, max_children=self.max_children)
        self.automaton = SuffixAutomaton(refresh=0)
        documents = []
        for name, ids in checked_documents(corpus):
            documents.append((name, len(self.automaton), len(ids)))
            self.automaton.extend(ids)
            self.automaton.end_document()
        self.automaton.freeze()
        self._source = {"corpus": _Indexed(self.automaton, documents)}
        self._largest_id = int(self.automaton.tokens().max())

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> MatchSession:
        target.require_ids("corpus", self._largest_id)
        cursor = self.automaton.cursor()
        cursor.advance_all(np.ascontiguousarray(prompt_ids, np.int32))
        draft = partial(self._tree, cursor)
        return MatchSession(lambda: cursor.length, cursor.advance_all, draft, self._source)

    def _tree(self, cursor: Cursor, budget: int) -> TokenTree:
        """The most frequent continuations, best first."""
        if cursor.length < self.min_match or budget <= 0:
            return TokenTree.empty()
        found = cursor.draft_tree(min(budget, self.max_draft), self.max_children, self.min_prob)
        return counted_tree(found, _TREE)
