"""A drafter that asks for all logits of what was fed, and what a forward of that alone gives."""

import torch
from transformers import DynamicCache

from hf_retrieval_assist import TokenTree
from hf_retrieval_assist.drafters.base import Drafter, DraftSession, FeedbackNeeds
from hf_retrieval_assist.host.transformers_private import CACHE


class Learner(Drafter):
    """Drafts what follows in a row's known text, and a wrong token behind it.

    Attributes:
        shown: of each forward behind a prompt the text up to the last node, int64 [1, length], and
            what was handed over, to be read when the call has ended.
    """

    needs = FeedbackNeeds(logits=True, top_k=2)

    def __init__(self, texts, depth=3):
        self.texts, self.depth, self.shown = [list(text) for text in texts], depth, []

    def start(self, prompt_ids, target):
        return _Session(prompt_ids.tolist())

    def propose(self, sessions, budgets):
        return [self._draft(*pair) for pair in zip(sessions, budgets, strict=True)]

    def _draft(self, session, budget):
        end = len(session.text)
        known = next((x for x in self.texts if x[:end] == session.text), session.text)
        tokens = [*known[end : end + self.depth - 1], 3][:budget]
        return TokenTree.chain(tokens, [0.9**i for i in range(1, 1 + len(tokens))])

    def commit(self, sessions, tokens, feedbacks):
        for session, token_ids, feedback in zip(sessions, tokens, feedbacks, strict=True):
            if len(session.text) > session.begun and feedback is not None:
                fed = [*session.text[:-1], *feedback.token_ids.tolist()]
                self.shown.append((torch.tensor([fed]), feedback))
            session.text += token_ids


class _Session(DraftSession):
    def __init__(self, prompt):
        self.text, self.begun = prompt, len(prompt)


@torch.no_grad()
def expected_logits(model, learner, length):
    """What each of the learner's forwards was to show, by one forward behind that of the prompt,
    which has so many tokens."""
    found = []
    for ids, shown in learner.shown:
        cache = DynamicCache(config=model.config)
        model(ids[:, :length], **{CACHE: cache})
        logits = model(ids[:, length:], **{CACHE: cache}).logits
        found.append(logits[0, -len(shown.token_ids) :])
    return found
