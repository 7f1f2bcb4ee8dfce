"""SAM-Decoding (Hu et al., 2024, https://arxiv.org/abs/2411.10666)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from ..corpus.datastore import Datastore
from ..corpus.readers import Corpus, tokenised
from ..draft_models.fallbacks import Fallback, fallback_drafters
from ..drafters.automaton import AutomatonDrafter, StaticAutomatonDrafter
from ..drafters.base import Drafter, DraftSession
from ..drafters.rest import RestDrafter
from ..drafters.suffix import SuffixDrafter
from ..memory.output_memory import OutputMemory
from ..policy.policy import Options, union
from ..presets import require, shows_arguments
from ..system.arguments import require_at_least
from ..types.token_tree import TokenTree
from .paper import Paper

# Corpus continuations rarer than this cost more to look at than they bring.
_LEAST_PROB = 0.01


class SamDecoding(Paper):
    """The longer match drafts; below a length, the fallback does (section 3.3).

    Suffix automata of the text and of a corpus match the longest end of the text (sections 3.1 and
    3.2), in `drafters/automaton.py`; a datastore stands for the second one.

    Args:
        corpus: as for :class:`~hf_retrieval_assist.presets.SamAssistant`.
        fallback: as for :class:`~hf_retrieval_assist.presets.SamAssistant`.
        min_match: shortest match that drafts, in tokens; the paper's l_threshold.
        corpus_bias: tokens by which a corpus match must be longer than one in the text; its l_bias.
        max_draft: longest draft from a match, in tokens.
        memory: earlier outputs, which draft beside the fallback, and are taught; None: none.
        tokenizer: of the model; for a corpus of texts.

    Raises:
        ValueError: a size is out of range; and what `SamAssistant` raises.
    """

    @shows_arguments
    def __init__(
        self,
        corpus: Corpus | None = None,
        fallback: Fallback = "token_recycling",
        min_match: int = 5,
        corpus_bias: int = 5,
        max_draft: int = 40,
        memory: OutputMemory | None = None,
        *,
        tokenizer: Any = None,
        **options: Unpack[Options],
    ):
        require_at_least(0, min_match=min_match, corpus_bias=corpus_bias)
        require_at_least(1, max_draft=max_draft)
        self.min_match, self.corpus_bias, self.memory = min_match, corpus_bias, memory
        documents = None if corpus is None else tokenised(corpus, tokenizer)
        drafters: list[Drafter] = [AutomatonDrafter(max_draft)]
        if isinstance(documents, Datastore):
            sizes = {"max_nodes": max_draft, "continuation": max_draft}
            drafters.append(RestDrafter(documents, **sizes))
        elif documents is not None:
            drafters.append(StaticAutomatonDrafter(documents, max_draft, min_prob=_LEAST_PROB))
        self._matchers = len(drafters)
        if memory is not None:
            require(OutputMemory, memory=memory)
            drafters.append(SuffixDrafter(memory))
        super().__init__([*drafters, *fallback_drafters(fallback, memory)], **options)

    def choose(self, sessions: Sequence[DraftSession], drafts: Sequence[TokenTree]) -> TokenTree:
        biases = [0, *[self.corpus_bias] * (self._matchers - 1)]
        matching: Any = sessions[: self._matchers]
        matches = [
            session.match_length - bias for session, bias in zip(matching, biases, strict=True)
        ]
        longest = max(matches)
        if longest >= self.min_match:
            return drafts[matches.index(longest)]
        return union(drafts[self._matchers :])
