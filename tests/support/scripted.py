"""A drafter made of functions."""

from hf_retrieval_assist.drafters.base import Drafter, DraftSession


class Scripted(Drafter):
    """Drafts what a function of the budget says, for every text; `commit` is told the tokens that
    came and the feedback."""

    def __init__(self, propose, commit=lambda *_: None, **attributes):
        self.functions = propose, commit
        vars(self).update(attributes)

    def start(self, prompt_ids, target):
        return DraftSession()

    def propose(self, sessions, budgets):
        return [self.functions[0](budget) for budget in budgets]

    def commit(self, sessions, tokens, feedbacks):
        for token_ids, feedback in zip(tokens, feedbacks, strict=True):
            self.functions[1](token_ids, feedback)
