"""Drafts from suffix automata, as in SAM-Decoding (Hu et al., 2024).

One automaton grows over the prompt and the output of each session, another one is built once over
a corpus and shared. Both match the longest suffix of the text at O(1) a token and draft what stood
after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..structures.suffix_automaton import Cursor, SuffixAutomaton
from ..system.arguments import require_at_least
from ..types.evidence import EvidenceClasses
from ..types.token_tree import Ids, Int32Array, NamedIds, TokenTree, checked_documents
from .base import Drafter, DraftSession, Feedbacks, Target, Tokens

# Nodes are told apart by tokens matched and by depth. Priors are measured: the share of drafted
# nodes that the recorded text went on with, among those whose parents it went on with. Real chat,
# programs, worked mathematics, SQL and file edits; a kind of text counts at most a thousand nodes
# per class.
_CHAIN = EvidenceClasses(
    [
        [0.217, 0.378, 0.536, 0.708, 0.841, 0.955],
        [0.291, 0.404, 0.570, 0.759, 0.944, 0.988],
        [0.326, 0.402, 0.620, 0.836, 0.930, 0.987],
        [0.340, 0.429, 0.580, 0.839, 0.915, 0.988],
        [0.371, 0.454, 0.701, 0.820, 0.878, 0.980],
        [0.397, 0.574, 0.743, 0.830, 0.862, 0.983],
        [0.469, 0.653, 0.743, 0.763, 0.862, 0.950],
        [0.531, 0.674, 0.804, 0.789, 0.941, 0.957],
        [0.953, 0.981, 0.984, 0.989, 0.990, 0.991],
    ],
    *((2, 3, 4, 5, 7, 9, 13, 21), (2, 3, 5, 9, 17)),
)


@dataclass(eq=False)
class MatchSession(DraftSession):
    """A text, and where an automaton holds the longest of its ends.

    Attributes:
        cursor: where it is held.
        extend: goes on with tokens of the text.
        vocab_size: of the model.
    """

    cursor: Cursor
    extend: Callable[[Int32Array], object]
    vocab_size: int

    @property
    def match_length(self) -> int:
        """Tokens at the end of the text that the automaton holds elsewhere."""
        return self.cursor.length


class AutomatonDrafter(Drafter):
    """Drafts what followed the longest earlier match in the prompt and output of the session.

    Args:
        max_draft: the longest draft.

    Raises:
        ValueError: max_draft below 1.
    """

    name = "automaton"
    origins = ("text",)
    evidence = _CHAIN

    def __init__(self, max_draft: int = 40) -> None:
        require_at_least(1, max_draft=max_draft)
        self.max_draft = max_draft

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> MatchSession:
        automaton = SuffixAutomaton(capacity=len(prompt_ids))
        cursor = automaton.cursor()
        for expected in target.expected:
            automaton.extend(expected)
            automaton.end_document()
        automaton.extend(np.ascontiguousarray(prompt_ids, np.int32), cursor)
        extend = partial(automaton.extend, cursor=cursor)
        return MatchSession(cursor, extend, target.vocab_size)

    def propose(
        self, sessions: Sequence[MatchSession], budgets: Sequence[int]
    ) -> Sequence[TokenTree]:
        pairs = zip(sessions, budgets, strict=True)
        return [_chain(session, min(budget, self.max_draft)) for session, budget in pairs]

    def commit(
        self, sessions: Sequence[MatchSession], tokens: Tokens, feedbacks: Feedbacks
    ) -> None:
        for session, token_ids in zip(sessions, tokens, strict=True):
            session.extend(np.array(token_ids, np.int32))


def _chain(session: MatchSession, most: int) -> TokenTree:
    """Tokens that followed a match's earliest occurrence, `most` of them at most."""
    cursor = session.cursor
    if not cursor.length or most <= 0:
        return TokenTree.empty()
    tokens = cursor.draft(most)
    # Only a prompt, or an expected text, holds ids that the output layer has no row for.
    foreign = np.flatnonzero(tokens >= session.vocab_size)
    tokens = tokens[: foreign[0]] if len(foreign) else tokens
    classes = _CHAIN.of(cursor.length, np.arange(1, len(tokens) + 1))
    probs = np.cumprod(_CHAIN.priors[classes], dtype=np.float32)
    return TokenTree.chain(tokens, probs, classes)


class StaticAutomatonDrafter(AutomatonDrafter):
    """Drafts what followed the longest match in a corpus.

    The corpus is indexed once and only read afterwards, by any number of sessions and threads.

    Args:
        corpus: documents as sequences of token ids; no match and no draft crosses them.
        max_draft: the longest draft.

    Raises:
        ValueError: the corpus holds no token, or bad ids; max_draft below 1. From `start`: the
            corpus holds an id that the target's vocabulary does not.
    """

    name = "corpus automaton"
    origins = ("corpus",)

    def __init__(self, corpus: Iterable[Ids | NamedIds], max_draft: int = 40) -> None:
        super().__init__(max_draft)
        self.automaton = SuffixAutomaton()
        self._largest_id = -1
        for ids in checked_documents(corpus):
            self.automaton.extend(ids)
            self.automaton.end_document()
            self._largest_id = max(self._largest_id, int(ids.max()))

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> MatchSession:
        target.require_ids("corpus", self._largest_id)
        cursor = self.automaton.cursor()
        cursor.advance_all(np.ascontiguousarray(prompt_ids, np.int32))
        return MatchSession(cursor, cursor.advance_all, target.vocab_size)
