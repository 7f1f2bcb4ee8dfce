"""The published systems as assistants, all on the same loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .assistants import Assistant
from .drafters.automaton import AutomatonDrafter, StaticAutomatonDrafter, Tokens
from .drafters.base import Drafter, DraftSession
from .drafters.token_recycling import TokenRecyclingDrafter
from .token_tree import TokenTree

_LONGEST_DRAFT = 256


def fallback_drafter(fallback: Any) -> list[Drafter]:
    """The drafter that a preset's `fallback=` names, if any.

    Raises:
        ValueError: an unknown name.
        TypeError: something that cannot draft.
    """
    if fallback is None:
        return []
    if isinstance(fallback, Drafter):
        return [fallback]
    if fallback == "token_recycling":
        return [TokenRecyclingDrafter()]
    if isinstance(fallback, str):
        raise ValueError(f"fallback: expected 'token_recycling', got {fallback!r}")
    raise TypeError(
        f"fallback: expected 'token_recycling', a drafter or None, got {type(fallback).__name__}"
    )


class SamAssistant(Assistant):
    """SAM-Decoding (Hu et al., 2024): suffix automata over the text itself and over a corpus.

    Under `budget="auto"` all drafts are merged and weighed by what their evidence was worth so far.
    `budget="paper"` applies the paper's rule (section 3.3): the longer match drafts, a corpus match
    counting `corpus_bias` tokens less, and below `min_match` tokens the fallback does.

    Args:
        corpus: documents as sequences of token ids, indexed once.
        fallback: "token_recycling", a drafter, or None.
        min_match: shortest match that drafts under "paper", in tokens.
        corpus_bias: tokens by which a corpus match must be longer than one in the text.
        max_draft: longest draft from a match under "paper".
        **options: of :class:`Assistant`.

    Raises:
        ValueError: a bad size or an empty corpus; from `generate`, a corpus id outside the model's
            vocabulary.
    """

    def __init__(
        self,
        corpus: Iterable[Tokens] | None = None,
        fallback: Any = "token_recycling",
        min_match: int = 5,
        corpus_bias: int = 5,
        max_draft: int = 40,
        **options: Any,
    ):
        for name, value in (("min_match", min_match), ("corpus_bias", corpus_bias)):
            if value < 0:
                raise ValueError(f"{name}: expected at least 0, got {value}")
        # Under "auto" the planner says how long drafts may be.
        limit = max_draft if options.get("budget") == "paper" else max(max_draft, _LONGEST_DRAFT)
        retrieval: list[Drafter] = [AutomatonDrafter(limit)]
        if corpus is not None:
            retrieval.append(StaticAutomatonDrafter(corpus, limit))
        self.min_match = min_match
        self.corpus_bias = corpus_bias
        self._retrieval = len(retrieval)
        super().__init__([*retrieval, *fallback_drafter(fallback)], **options)

    def combine(self, sessions: Sequence[DraftSession], drafts: Sequence[TokenTree]) -> TokenTree:
        if self.planner.budget != "paper":
            return super().combine(sessions, drafts)
        biases = [0, *[self.corpus_bias] * (self._retrieval - 1)]
        matches = [
            session.match_length - bias  # type: ignore[attr-defined]
            for session, bias in zip(sessions, biases, strict=False)
        ]
        longest = max(matches)
        if longest >= self.min_match:
            return drafts[matches.index(longest)]
        return drafts[self._retrieval] if len(drafts) > self._retrieval else TokenTree.empty()
