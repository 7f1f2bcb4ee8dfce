"""Logit n-grams: what the model thought likely behind the last tokens, whenever it has read them.

Every verified node, rejected ones included, shows what the model thought likely behind the one to
four tokens that lead to it. A table keeps the ten likeliest of each context, as STAND does (Song et
al. 2025, https://arxiv.org/abs/2506.04708, section 3). Drafts mix the lengths of context, and what
the last token was chosen from. Sampled ones are raced with the numbers that will draw the tokens,
where these are known: so the table keeps the seed, while STAND keeps the law.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..memory.output_memory import OutputMemory
from ..structures import logit_ngrams
from ..structures.logit_ngrams import Ngrams, NgramText
from ..types.evidence import EvidenceClasses
from ..types.token_tree import Forest
from .base import Drafter, DraftSession, Feedback, FeedbackNeeds, Feedbacks, Target, Tokens
from .call_view import Law

# Rates begin in the middle of their steps.
_EDGES = np.concatenate([[0.003], logit_ngrams.RATE_EDGES, [1.0]])
_RATES = np.sqrt(_EDGES[1:] * _EDGES[:-1]).astype(np.float32)
_EVIDENCE = EvidenceClasses(np.broadcast_to(_RATES, logit_ngrams.CLASS_SHAPE).ravel())
_LEAST_PROB = 0.004
# Draws of a text that are looked at before they are made: of many texts, whose drafts are short,
# fewer of each.
_FEWEST_LEVELS, _MOST_LEVELS = 2, 8
# Rejected nodes learnt per step where a top k is not free.
_MOST_REJECTED = 16
# Contexts of a table, those that were met longest ago giving way; and what each takes.
_FEWEST_CONTEXTS, _MOST_CONTEXTS = 8, 1 << 18
_CONTEXT_BYTES = Ngrams(_FEWEST_CONTEXTS).nbytes // _FEWEST_CONTEXTS


class LogitNgramDrafter(Drafter):
    """Drafts from what the target thought likely behind its last tokens.

    The table is shared by all sessions, so by rows of a batch while they are written, stays warm
    from call to call, and belongs to one target. It learns from logits, so nothing where nobody
    shows any, as in a simulation. Several threads may use it: compiled code reads and writes it
    while it holds Python's lock.

    Args:
        memory: whose tenant, bound and end the tables share; None for a new one that this drafter
            keeps.
    """

    name = "logit_ngrams"
    origins = ("logit n-grams",)
    needs = FeedbackNeeds(top_k=logit_ngrams.LIKELIEST)
    evidence = _EVIDENCE

    def __init__(self, memory: OutputMemory | None = None) -> None:
        self.memory = OutputMemory() if memory is None else memory

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> NgramSession:
        own = Ngrams(_MOST_CONTEXTS) if target.is_confidential else None
        shared = self.memory.table(self.name, target.fingerprint, _table_within)
        return NgramSession(shared, own, prompt_ids, target)

    def propose(self, sessions: Sequence[NgramSession], budgets: Sequence[int]) -> Forest:
        vocab_size = sessions[0].target.vocab_size
        levels = min(max(_FEWEST_LEVELS, _MOST_LEVELS // len(sessions)), max(budgets))
        laws: list[tuple[Any, ...]] = []
        numbers: list[list[Any]] = []
        for session in sessions:
            preview = session.target.call.preview
            if preview is None or not preview.draws:
                laws.append((logit_ngrams.GREEDY, *Law()))
                numbers.append([])
            else:
                known = preview.ahead(vocab_size, levels)
                mode = logit_ngrams.RACED if known else logit_ngrams.BLIND
                laws.append((mode, *preview.law))
                numbers.append(known)
        draft = logit_ngrams.draft(
            [session.text for session in sessions],
            np.array(budgets, np.int64),
            laws,
            numbers,
            self.evidence.priors,
            vocab_size,
            _LEAST_PROB,
        )
        return Forest(*draft)

    def commit(
        self, sessions: Sequence[NgramSession], tokens: Tokens, feedbacks: Feedbacks
    ) -> None:
        """Texts learn together what one forward showed."""
        shown: list[tuple[NgramSession, Feedback]] = []
        table = sessions[0].table  # all texts of a call share it, or each has one that is its own
        before = table.nbytes
        for session, feedback in zip(sessions, feedbacks, strict=True):
            if feedback is not None and feedback.top is not None:
                if len(session.unread):
                    session.read_prompt(len(feedback.token_ids) - 1)
                shown.append((session, feedback))
            else:
                session.text.forget_last()
        if shown:
            _learn(*zip(*shown, strict=True))
        if table.nbytes > before:
            self.memory.make_room()
        for session, token_ids in zip(sessions, tokens, strict=True):
            if len(session.unread):
                session.read_prompt(0)
            session.text.extend(token_ids)


def _table_within(max_bytes: int) -> Ngrams:
    contexts = max(_FEWEST_CONTEXTS, max_bytes // _CONTEXT_BYTES)
    return Ngrams(min(_MOST_CONTEXTS, 1 << (contexts.bit_length() - 1)))


class NgramSession(DraftSession):
    """A text, and what is known of it.

    Attributes:
        text: without what is unread.
        unread: the end of the prompt.
        table: that it teaches.
        target: the model, as this text sees it.
    """

    def __init__(
        self,
        shared: Ngrams,
        own: Ngrams | None,
        prompt_ids: NDArray[np.int32],
        target: Target,
    ) -> None:
        self.target, self.unread = target, prompt_ids
        self.text, self.table = NgramText(shared, own), shared if own is None else own

    def read_prompt(self, left: int) -> None:
        """Append what is unread of the prompt but for so many of its last tokens."""
        end = len(self.unread) - left
        self.text.extend(self.unread[:end].tolist())
        self.unread = self.unread[end:]


def _learn(sessions: Sequence[NgramSession], feedbacks: Sequence[Feedback]) -> None:
    """Let texts learn what one forward showed of them."""
    sizes = [len(feedback.token_ids) for feedback in feedbacks]
    starts = np.array([0, *accumulate(sizes)])
    first, *others = [feedback.top for feedback in feedbacks if feedback.top is not None]
    top = first.joined(others) if others else first
    nodes = np.arange(starts[-1])
    if not top.free and max(sizes) > 1 + _MOST_REJECTED:
        learnt = nodes - starts[:-1].repeat(sizes) <= _MOST_REJECTED
        for feedback, start in zip(feedbacks, starts, strict=False):
            learnt[start + feedback.accepted] = True
        nodes = nodes[learnt]
    vocab_size = sessions[0].target.vocab_size
    ids, logits = top.of(nodes, min(logit_ngrams.LIKELIEST, vocab_size), vocab_size)
    logit_ngrams.learn(
        [session.text for session in sessions],
        starts,
        np.concatenate([feedback.token_ids for feedback in feedbacks]),
        np.concatenate([feedback.parents for feedback in feedbacks]),
        np.array([start + one.accepted[-1] for start, one in zip(starts, feedbacks, strict=False)]),
        nodes,
        ids,
        logits,
    )
