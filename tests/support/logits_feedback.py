"""A drafter that asks for all logits of what was fed, and what a forward of that alone gives."""

import torch
from transformers import DynamicCache

from hf_retrieval_assist import TokenTree
from hf_retrieval_assist.drafters.base import FeedbackNeeds
from hf_retrieval_assist.host.transformers_private import CACHE

from .oracle_drafter import OracleDrafter


class Learner(OracleDrafter):
    """Drafts what follows in a row's known text, and a wrong token behind it.

    Attributes:
        shown: of each forward behind a prompt the text up to the last node, int64 [1, length], and
            what was handed over, to be read when the call has ended.
    """

    needs = FeedbackNeeds(logits=True, top_k=2)

    def __init__(self, texts, depth=3):
        super().__init__(texts, depth=depth)
        self.shown = []

    def draft(self, coming, budget):
        tokens = [*coming[: self.depth - 1], 3][:budget]
        return TokenTree.chain(tokens, [0.9**i for i in range(1, 1 + len(tokens))])

    def commit(self, sessions, tokens, feedbacks):
        for session, feedback in zip(sessions, feedbacks, strict=True):
            if session.length > session.begun and feedback is not None:
                fed = [*session.text[: session.length - 1], *feedback.token_ids.tolist()]
                self.shown.append((torch.tensor([fed]), feedback))
        super().commit(sessions, tokens, feedbacks)


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
