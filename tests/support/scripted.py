"""A drafter made of functions."""

from hf_retrieval_assist.drafters.base import Drafter, DraftSession


class Scripted(Drafter, DraftSession):
    """Drafts what a function of the budget says, for every text; `commit` is told the tokens that
    came and the feedback."""

    def __init__(self, propose, commit=lambda *_: None, **attributes):
        self.functions = propose, commit
        vars(self).update(attributes)

    def start(self, prompt_ids, target):
        return self

    def propose(self, budget):
        return self.functions[0](budget)

    def commit(self, token_ids, feedback):
        self.functions[1](token_ids, feedback)
