"""SAM-Decoding (Hu et al., 2024, https://arxiv.org/abs/2411.10666)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from ..assistants import Assistant
from ..corpus.datastore import Datastore
from ..corpus.readers import Corpus, tokenised
from ..drafters.automaton import AutomatonDrafter, StaticAutomatonDrafter
from ..drafters.base import Drafter
from ..policy.policy import DraftingPolicy, Options
from ..policy.step import DraftedStep
from ..system.arguments import require_at_least
from ..types.token_tree import Forest
from .paper import MOST_NODES, PaperPolicy, PapersFallback, papers_fallback


class SamPolicy(PaperPolicy):
    """The automaton with the longer match drafts; below a length, the fallback does.

    Args:
        drafters: automata of the text and of the corpus, if there is one; then the fallback's.
        biases: of each automaton, the tokens by which its match counts for less.
        min_match: see `SamDecoding`.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        biases: Sequence[int],
        min_match: int,
        **options: Any,
    ) -> None:
        super().__init__(drafters, len(biases), **options)
        self._biases, self._min_match = biases, min_match

    def propose(self, step: DraftedStep, budget: int) -> Forest:
        drafts = Forest.empty(len(step.sessions))
        chosen = [self._longer(text.sessions) for text in step.sessions]
        for automaton in range(len(self._biases)):
            places = [place for place, one in enumerate(chosen) if one == automaton]
            drafts = drafts.merge(self.ask(automaton, step, budget, places))
        # A match at the very end of a document has nothing behind it.
        without = [place for place, nodes in enumerate(drafts.sizes) if not nodes]
        return drafts.merge(self.ask_fallback(step, budget, without))

    def _longer(self, sessions: Sequence[Any]) -> int | None:
        """The automaton of the longer match, the text's among equals; None: both are too short."""
        matches = zip(sessions, self._biases, strict=False)
        lengths = [session.match_length - bias for session, bias in matches]
        longest = max(lengths)
        return lengths.index(longest) if longest >= self._min_match else None


class SamDecoding(Assistant):
    """The longer match drafts; where both are short, the fallback does.

    Suffix automata of the text and of a corpus know the longest end of the text that occurs in
    each. A chain of tokens is drafted that follows where the end occurred first (min_endpos).

    As in the released code and not in the paper's text: where fewer than `max_draft` tokens follow,
    a shorter end is looked at, which occurred earlier; and a match in the corpus counts for less by
    `corpus_bias` before it is held against `min_match`, so that by default it takes 10 tokens.

    Differences from the released code: `max_draft` counts drafted tokens, where its 40 counts the
    root too; a short draft is not filled up with token 0; the released fallback that is no Token
    Recycling is EAGLE, here any fallback; no match and no draft crosses documents; the texts of
    `expecting` stand before the prompt. The fallback is asked only for texts that need it.

    Args:
        corpus: documents, as for :class:`~hf_retrieval_assist.presets.SamAssistant`, but no
            `Datastore`.
        fallback: "token_recycling"; or as for :class:`~hf_retrieval_assist.presets.SamAssistant`.
        min_match: shortest match that drafts, in tokens; the paper's l_threshold.
        corpus_bias: tokens by which a corpus match must be longer than one in the text; its l_bias.
        max_draft: longest draft from a match, in tokens.
        tokenizer: of the model; for a corpus of texts.

    Raises:
        ValueError: a size is out of range; and what `SamAssistant` raises.
        TypeError: a `Datastore`, which has no automaton.
    """

    def __init__(
        self,
        corpus: Corpus | None = None,
        fallback: PapersFallback = "token_recycling",
        min_match: int = 5,
        corpus_bias: int = 5,
        max_draft: int = 40,
        *,
        tokenizer: Any = None,
        **options: Unpack[Options],
    ):
        require_at_least(0, min_match=min_match, corpus_bias=corpus_bias)
        require_at_least(1, max_draft=max_draft)
        automata: list[Drafter] = [AutomatonDrafter(max_draft)]
        if corpus is not None:
            documents = tokenised(corpus, tokenizer)
            if isinstance(documents, Datastore):
                raise TypeError(
                    "corpus: expected documents, which are indexed in memory, got a Datastore; "
                    "SamAssistant(corpus=...) and papers.Rest(...) draft from it"
                )
            automata.append(StaticAutomatonDrafter(documents, max_draft))
        self.min_match, self.corpus_bias = min_match, corpus_bias
        self._biases = [0, corpus_bias][: len(automata)]
        drafters = [*automata, *papers_fallback(fallback)]
        super().__init__(drafters, budget=max(max_draft, MOST_NODES), **options)

    def _policy(self, drafters: Sequence[Drafter], **options: Any) -> DraftingPolicy:
        return SamPolicy(drafters, self._biases, self.min_match, **options)
