"""A drafter made of functions."""

from hf_retrieval_assist.drafters.base import Drafter, DraftSession


class Scripted(Drafter):
    """Drafts what a function of the budget says, for every text.

    Args:
        commit: told the tokens that came and the feedback.
        attributes: of the drafter.
    """

    def __init__(self, propose, commit=lambda *_: None, **attributes):
        self.functions = propose, commit
        vars(self).update(attributes)

    def start(self, prompt_ids, target):
        return _Session(*self.functions)


class _Session(DraftSession):
    def __init__(self, propose, commit):
        self._propose, self._commit = propose, commit

    def propose(self, budget):
        return self._propose(budget)

    def commit(self, token_ids, feedback):
        self._commit(token_ids, feedback)
