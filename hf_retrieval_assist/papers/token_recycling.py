"""Token Recycling (Luo et al., 2024, https://arxiv.org/abs/2408.08696)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from ..drafters.base import Drafter, DraftSession, FeedbackNeeds, Feedbacks, Target, Tokens
from ..memory.output_memory import OutputMemory
from ..structures import draft_tree
from ..system.locks import Lock
from ..types.evidence import EvidenceClasses
from ..types.token_tree import Int32Array, TokenTree
from ..verification.verified import TopLogits

TOP_K = 8
UNKNOWN = -1
# SAM-Decoding's tree of 60 nodes: children of each node, level by level, those of the root first.
CHILD_COUNTS = np.array(
    [
        *(7,),
        *(6, 5, 3, 2, 2, 1, 1),
        *(3, 2, 2, 1, 1, 0, 3, 2, 1, 1, 0, 1, 1, 0, 1, 0, 1, 0, 1, 0),
        *(2, 1, 0, 1, 0, 0, 0, 0, 0, 2, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0),
        *(2, 0, 1, 0, 1, 0, 0, 0),
        *(0, 0, 0, 0),
    ]
)
# Where each level begins among the nodes, of which the first is the root.
LEVELS = [slice(*ends) for ends in pairwise(accumulate((1, 7, 20, 21, 8, 4)))]
# int32 [60]: the node above each node but the root, and the node's rank among that one's children.
PARENTS = np.arange(len(CHILD_COUNTS)).repeat(CHILD_COUNTS).astype(np.int32)
RANKS = np.arange(60, dtype=np.int32) - (CHILD_COUNTS.cumsum() - CHILD_COUNTS)[PARENTS]
# How often the child of each rank is accepted, measured with Gemma-3-270M.
_ACCEPTED = (0.352, 0.093, 0.052, 0.037, 0.027, 0.020, 0.017, 0.014)


class TokenRecycling(Drafter):
    """Drafts from the target's own second thoughts.

    The table has for every token the 8 tokens that the target found likeliest after it when the
    token was last fed, in the prompt or in a draft, accepted or not. A fixed tree of ranks is laid
    over it.

    The tree is the one with which SAM-Decoding uses Token Recycling, of 60 nodes; the authors'
    own has 80. Where a token was fed at several nodes, an accepted one decides and otherwise the
    last one; the released code leaves that open. A row that nobody has written yet drafts nothing,
    where the released code drafts token 0.

    Args:
        memory: that the tables are kept with, and forgotten with; None: they are this drafter's.
    """

    name = "token_recycling"
    needs = FeedbackNeeds(top_k=TOP_K)
    evidence = EvidenceClasses(_ACCEPTED)

    def __init__(self, memory: OutputMemory | None = None) -> None:
        self._memory = OutputMemory() if memory is None else memory

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> _Session:
        size = target.vocab_size
        table = self._memory.table(f"{self.name} {size}", target.fingerprint, lambda _: Table(size))
        return _Session(table.copy() if target.is_confidential else table)

    def propose(self, sessions: Sequence[_Session], budgets: Sequence[int]) -> Sequence[TokenTree]:
        pairs = zip(sessions, budgets, strict=True)
        return [session.table.draft(session.last).prune(budget) for session, budget in pairs]

    def commit(self, sessions: Sequence[_Session], tokens: Tokens, feedbacks: Feedbacks) -> None:
        for session, token_ids, feedback in zip(sessions, tokens, feedbacks, strict=True):
            session.last = token_ids[-1]
            if feedback is not None and feedback.top is not None:
                before = session.table.nbytes
                session.table.learn(feedback.token_ids, feedback.accepted, feedback.top)
                if session.table.nbytes > before:
                    self._memory.make_room()


@dataclass(eq=False)
class _Session(DraftSession):
    """The last token of a text, and the table that it reads and teaches."""

    table: Table
    last: int = UNKNOWN


class Table:
    """int32 [vocab_size + 1, 8], made when the first logits come; the last row is never known."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.successors: Int32Array = np.full((1, TOP_K), UNKNOWN, np.int32)
        self.lock = Lock()

    @property
    def nbytes(self) -> int:
        return self.successors.nbytes

    def copy(self) -> Table:
        table = Table(self.vocab_size)
        table.successors = self.successors.copy()
        return table

    def learn(self, fed: Int32Array, accepted: Int32Array, top: TopLogits) -> None:
        """Write the rows of the tokens that one forward fed."""
        nodes = np.arange(len(fed))
        best = np.full((len(fed), TOP_K), UNKNOWN, np.int32)
        ranks = min(TOP_K, self.vocab_size)
        best[:, :ranks] = top.of(nodes, ranks, self.vocab_size)[0]
        order = np.append(np.delete(nodes, accepted), accepted)  # the last one written stays
        order = order[fed[order] < self.vocab_size]
        with self.lock:
            if len(self.successors) == 1:
                self.successors = np.full((self.vocab_size + 1, TOP_K), UNKNOWN, np.int32)
            self.successors[fed[order]] = best[order]

    def draft(self, root: int) -> TokenTree:
        """The tree over the table, level by level, without what is not known."""
        ids = np.full(len(CHILD_COUNTS), UNKNOWN, np.int32)
        with self.lock:
            ids[0] = root if root < len(self.successors) - 1 else UNKNOWN
            for level in LEVELS:
                above, ranks = PARENTS[level.start - 1 : level.stop - 1], RANKS[level.start - 1 :]
                ids[level] = self.successors[ids[above], ranks[: len(above)]]
        parents = PARENTS - np.int32(1)
        probs = draft_tree.path_products(parents, TokenRecycling.evidence.priors[RANKS])
        return TokenTree.build(ids[1:], parents, probs, RANKS).without(ids[1:] == UNKNOWN)
