"""A drafter that knows how the text goes on and hides it among wrong branches.

With it every step of a test accepts long paths that do not lie at the front of the fed tokens,
rejects others, and now and then gets no draft at all.
"""

import numpy as np
import torch

from hf_retrieval_assist import Assistant
from hf_retrieval_assist.drafters.base import Drafter, DraftSession
from hf_retrieval_assist.types.token_tree import TokenTree


class OracleDrafter(Drafter):
    """Drafts for texts whose continuations are known.

    Args:
        texts: for each row of the next call its prompt without padding and its continuation.
        miss: probability that the true token is left out of a tree, which ends its true path.
        depth: tokens drafted at most along the true path.
    """

    name = "oracle"

    def __init__(self, texts, seed=0, miss=0.1, depth=6):
        self.texts = [list(text) for text in texts]
        self.rng = np.random.default_rng(seed)
        self.miss = miss
        self.depth = depth
        self._started = 0

    def start(self, prompt_ids, target):
        text = self.texts[self._started % len(self.texts)]
        self._started += 1
        self.vocab_size = target.vocab_size
        return _OracleSession(text, len(prompt_ids))

    def propose(self, sessions, budgets):
        pairs = zip(sessions, budgets, strict=True)
        return [self.draft(one.text[one.length :], budget) for one, budget in pairs]

    def commit(self, sessions, tokens, feedbacks):
        for session, token_ids in zip(sessions, tokens, strict=True):
            session.length += len(token_ids)

    def draft(self, coming, budget):
        """The tree for a text that goes on by these tokens."""
        edges, end = [], -1
        for token in coming[: int(self.rng.integers(0, self.depth + 1))]:
            for _ in range(int(self.rng.integers(0, 3))):
                # A wrong sibling in front of the true token moves that one out of the first slots.
                end_of_wrong = self._add(edges, end, self._random())
                self._add(edges, end_of_wrong, self._random())
            if self.rng.random() < self.miss:
                break
            end = self._add(edges, end, token)
        if edges:
            self._add(edges, len(edges) - 1, self._random())
        parents, probs = [parent for parent, _ in edges[:budget]], []
        for parent in parents:
            probs.append(0.95 * (probs[parent] if parent >= 0 else 1.0))
        return TokenTree.build([token for _, token in edges[:budget]], parents, probs)

    def _random(self):
        return int(self.rng.integers(0, self.vocab_size))

    @staticmethod
    def _add(edges, parent, token):
        """The child of a node that carries a token, made where there is none."""
        if (parent, token) not in edges:
            edges.append((parent, token))
        return edges.index((parent, token))


class _OracleSession(DraftSession):
    def __init__(self, text, length):
        self.text, self.length, self.begun = text, length, length


def oracle_assistant(
    result, attention_mask=None, budget=64, drafter=OracleDrafter, fixed_width=None, **options
):
    """An assistant for a call whose result is known from a plain run, which drafts for parts that
    tests have written; options are the drafter's."""
    rows = sequences_of(result).tolist()
    if attention_mask is not None:
        padding = (attention_mask == 0).sum(dim=1).tolist()
        rows = [row[skip:] for row, skip in zip(rows, padding, strict=True)]
    # Every node of a draft is verified, whatever it costs.
    drafters = [drafter(rows, **options)]
    options = {"fixed_width": fixed_width, "reroute": False, "trust_forward": True}
    return Assistant(drafters, budget=budget, **options)


def sequences_of(result):
    return result if isinstance(result, torch.Tensor) else result.sequences


def agreeing(
    model, inputs, tier="", seed=0, oracle=None, make=None, graphs=True, each=dict, **kwargs
):
    """Generate plainly, and the same with an assistant that knows the outcome, under one seed.

    A call that says that it keeps the seed has left the random state where plain decoding does.

    Args:
        tier: at which drafts were accepted, or "plain"; empty: at any, if they were.
        make: makes another assistant from plain decoding's result.
        each: makes options of one call, whose objects are its own.
    """
    torch.manual_seed(seed)
    plain = model.generate(**inputs, **kwargs, **each())
    left = torch.get_rng_state()
    if make is None:
        mask = inputs.get("attention_mask")
        assistant = oracle_assistant(plain, mask, **(oracle or {}))
    else:
        assistant = make(plain)
    assistant.policy.graphs = graphs
    torch.manual_seed(seed)
    assisted = model.generate(**inputs, **kwargs, **each(), assistant=assistant)
    assert torch.equal(sequences_of(plain), sequences_of(assisted))
    if assistant.stats.last.keeps_seed:
        assert torch.equal(torch.get_rng_state(), left)
    if tier:
        assert assistant.stats.last.tier == tier, assistant.stats.last.reason
        assert (assistant.stats.last.accepted > 0) == (tier != "plain")
    return plain, assisted, assistant
