"""SAM-Decoding (Hu et al., 2024, https://arxiv.org/abs/2411.10666)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..corpus.datastore import Datastore
from ..drafters.automaton import AutomatonDrafter, StaticAutomatonDrafter
from ..drafters.base import Drafter, DraftSession
from ..drafters.rest import RestDrafter
from ..policy.policy import union
from ..system.arguments import require_at_least
from ..types.token_tree import Ids, TokenTree

# Corpus continuations rarer than this cost more to look at than they bring.
_LEAST_PROB = 0.01


@dataclass(frozen=True)
class SamDecoding:
    """The longer match drafts; below a length, the fallback does (section 3.3).

    Suffix automata of the text and of a corpus match the longest end of the text (sections 3.1 and
    3.2), in `drafters/automaton.py`; a datastore stands for the second one.

    Attributes:
        min_match: shortest match that drafts, in tokens; the paper's l_threshold.
        corpus_bias: tokens by which a corpus match must be longer than one in the text; its l_bias.
        max_draft: longest draft from a match, in tokens.

    Raises:
        ValueError: a size is out of range.
    """

    min_match: int = 5
    corpus_bias: int = 5
    max_draft: int = 40

    def __post_init__(self) -> None:
        require_at_least(0, min_match=self.min_match, corpus_bias=self.corpus_bias)
        require_at_least(1, max_draft=self.max_draft)

    def drafters(self, corpus: Iterable[Ids] | Datastore | None) -> list[Drafter]:
        """What matches: the text, then a corpus."""
        own = AutomatonDrafter(self.max_draft)
        if corpus is None:
            return [own]
        if isinstance(corpus, Datastore):
            size = self.max_draft
            return [own, RestDrafter(corpus, max_nodes=size, continuation=size)]
        return [own, StaticAutomatonDrafter(corpus, self.max_draft, min_prob=_LEAST_PROB)]

    def choose(
        self, sessions: Sequence[DraftSession], drafts: Sequence[TokenTree], matchers: int
    ) -> TokenTree:
        """The draft to verify, the first `matchers` being those of `drafters`."""
        biases = [0, *[self.corpus_bias] * (matchers - 1)]
        matching: Any = sessions[:matchers]
        matches = [
            session.match_length - bias for session, bias in zip(matching, biases, strict=True)
        ]
        longest = max(matches)
        if longest >= self.min_match:
            return drafts[matches.index(longest)]
        return union(drafts[matchers:])
