"""A drafter made of functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hf_retrieval_assist.drafters.base import Drafter, DraftSession, Feedback, Target
from hf_retrieval_assist.token_tree import TokenTree


class Scripted(Drafter):
    """Drafts what a function of the budget says, for every text.

    Args:
        commit: told the tokens that came and the feedback.
        attributes: of the drafter.
    """

    def __init__(
        self,
        propose: Callable[[int], TokenTree],
        commit: Callable[[Sequence[int], Feedback | None], None] = lambda *_: None,
        **attributes: Any,
    ):
        self.functions = propose, commit
        vars(self).update(attributes)

    def start(self, prompt_ids: Any, target: Target) -> DraftSession:
        return _Session(*self.functions)


class _Session(DraftSession):
    def __init__(self, propose: Any, commit: Any):
        self._propose, self._commit = propose, commit

    def propose(self, budget: int) -> TokenTree:
        return self._propose(budget)

    def commit(self, token_ids: Sequence[int], feedback: Feedback | None) -> None:
        self._commit(token_ids, feedback)
