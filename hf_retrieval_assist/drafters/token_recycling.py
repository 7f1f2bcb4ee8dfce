"""Token Recycling: the most likely successors of every token, remembered from earlier logits.

Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token
Recycling" (2024), sections 3.1 to 3.3. A table [vocab_size, k] holds, for every token, the k tokens
that the target found most likely after it the last time it was fed. A static tree of ranks is laid
over the table to draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..memory.output_memory import OutputMemory
from ..structures import successors
from ..system.arguments import require_at_least
from ..system.locks import Lock
from ..types.evidence import EvidenceClasses
from ..types.token_tree import Forest, Int32Array, TokenTree
from .base import BatchSession, Drafter, Feedback, FeedbackNeeds, Target

# Parents and ranks, int32 [n]: node "rank r below p" stands for the r-th likeliest successor of p's
# token. Parents of −1 are the root.
Ranks = tuple[Int32Array, Int32Array]

TEMPLATES: dict[str, tuple[int, ...]] = {
    # The authors' tree: 80 nodes below the root, six levels.
    "2.2.2": (
        *(8,),
        *(8, 4, 3, 2, 1, 1, 1, 1),
        *(8, 3, 2, 1, 1, 1, 1, 1, 2, 1, 0, 0, 1, 0, 0, 1, 0, 1, 1, 0, 0),
        *(5, 2, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0),
        *(3, 1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1, 0, 0),
        *(2, 0, 0, 1, 0, 0, 0, 0),
        *(0, 0, 0),
    ),
    # SAM-Decoding's: 60 nodes, five levels.
    "sam": (
        *(7,),
        *(6, 5, 3, 2, 2, 1, 1),
        *(3, 2, 2, 1, 1, 0, 3, 2, 1, 1, 0, 1, 1, 0, 1, 0, 1, 0, 1, 0),
        *(2, 1, 0, 1, 0, 0, 0, 0, 0, 2, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0),
        *(2, 0, 1, 0, 1, 0, 0, 0),
        *(0, 0, 0, 0),
    ),
}

# Edges of a successor's share among the k likeliest (the softmax of their logits). How sure the
# target was of a successor the last time tells more about its acceptance than its rank does.
_SHARE_EDGES = np.array([0.02, 0.1, 0.2, 0.5, 0.85, 0.97], dtype=np.float32)
# Acceptance given an accepted parent, measured with Gemma-3-270M on its own and on recorded texts.
# A column per kind of evidence: seven shares, then text learnt at rank 0, 1 and below. A row per
# stability (see `successors.write`).
_PRIORS = np.array(
    [
        [0.01, 0.03, 0.05, 0.10, 0.20, 0.27, 0.28, 0.23, 0.18, 0.08],
        [0.02, 0.05, 0.09, 0.16, 0.25, 0.25, 0.25, 0.24, 0.08, 0.03],
        [0.20, 0.20, 0.20, 0.31, 0.45, 0.49, 0.53, 0.48, 0.16, 0.15],
        [0.26, 0.26, 0.28, 0.42, 0.63, 0.76, 0.85, 0.80, 0.22, 0.14],
    ],
    dtype=np.float32,
)
_EVIDENCE = EvidenceClasses(_PRIORS.ravel())
_KINDS = _PRIORS.shape[1]
_FIRST_TEXT_KIND = len(_SHARE_EDGES) + 1
_UNKNOWN = -1
# Rejected nodes learnt per step where a top k is not free.
_MOST_REJECTED = 16
# Rows made at first; more than any real vocabulary needs.
_FIRST_ROWS = 1 << 20
_FIRST_PRIVATE_ROWS = 64
_ONE_START = np.zeros(1, np.int64)


def template_of(child_counts: Sequence[int], top_k: int) -> Ranks:
    """The nodes below the root, in breadth-first order, whose whole path has ranks below `top_k`.

    Args:
        child_counts: children of each node, breadth first, the root's first. Children take the
            ranks 0, 1, ...; so the counts determine the tree.
        top_k: ranks the table has.

    Raises:
        ValueError: the counts do not describe one whole tree.
    """
    counts = np.array(child_counts, np.int64)
    nodes = np.arange(len(counts))
    if not len(counts) or counts.min() < 0 or counts.sum() != len(counts) - 1:
        raise ValueError(
            "template: expected one non-negative child count per node, the root's first, and as "
            f"many nodes as children plus the root; got {len(counts)} counts with sum {sum(counts)}"
        )
    first = counts.cumsum() - counts  # child of each node, where it has any
    if len(early := np.flatnonzero(first < nodes)):
        raise ValueError(f"template: node {early[0]} has a child count but no parent")
    ranks: Any = nodes[:-1] - first.repeat(counts)
    parents: Any = (nodes - 1).repeat(counts)
    tree = TokenTree.build(ranks, parents, ranks).without(ranks >= top_k)
    return tree.parents, tree.token_ids


class TokenRecyclingDrafter(Drafter):
    """Drafts from the target's own second thoughts; needs no text, corpus or second model.

    The table is shared by all sessions, stays warm from call to call, and belongs to one target: a
    model with another fingerprint gets a table of its own.

    Rows come from the logits of verified nodes, rejected ones included, and from the prompt's where
    the engine has them. Before that the prompt itself teaches which token follows which, and so
    does the output where there are no logits, as in a simulation: the successor moves to the front
    of its row.

    Args:
        top_k: successors kept per token; the whole vocabulary where it is smaller.
        template: "2.2.2" (80 nodes, the authors'), "sam" (60 nodes, SAM-Decoding's), or the child
            counts of a tree, breadth first from the root.
        memory: whose tenant, bound and end the tables share; None for a new one that this drafter
            keeps.

    Raises:
        ValueError: `top_k` is not positive or `template` is not a tree.
    """

    name = "token_recycling"
    evidence = _EVIDENCE

    def __init__(
        self,
        top_k: int = 8,
        template: str | Sequence[int] = "2.2.2",
        memory: OutputMemory | None = None,
    ) -> None:
        require_at_least(1, top_k=top_k)
        if isinstance(template, str):
            if template not in TEMPLATES:
                raise ValueError(f"template: expected one of {sorted(TEMPLATES)}, got {template!r}")
            template = TEMPLATES[template]
        template_of(template, top_k)  # refuses counts that are no tree
        self.top_k = top_k
        self.needs = FeedbackNeeds(top_k=top_k)
        self.memory = OutputMemory() if memory is None else memory
        self._child_counts = template

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> _RecyclingSession:
        table = self._table_of(target)
        if target.expected or target.forms or not target.learn:
            # What a caller expects is told in confidence, and so is what comes of it.
            table = PrivateTable(table)
        for expected in target.expected:
            table.learn_text(expected)
        return _RecyclingSession(self, table, prompt_ids)

    def propose_rows(
        self, sessions: Sequence[_RecyclingSession], budgets: Sequence[int]
    ) -> Sequence[TokenTree]:
        table = sessions[0].table
        if any(session.table is not table for session in sessions):
            return super().propose_rows(sessions, budgets)
        return table.draft([session.last for session in sessions], budgets)

    def commit_rows(
        self,
        sessions: Sequence[_RecyclingSession],
        tokens: Sequence[Sequence[int]],
        feedbacks: Sequence[Feedback | None],
    ) -> None:
        """Texts with one table teach it together what the forward showed."""
        told: dict[SuccessorTable, list[Feedback]] = {}
        for session, token_ids, feedback in zip(sessions, tokens, feedbacks, strict=True):
            if feedback is None or feedback.top is None:
                session.table.learn_text(np.array([session.last, *token_ids], dtype=np.int32))
            else:
                told.setdefault(session.table, []).append(feedback)
            session.last = token_ids[-1]
        for table, found in told.items():
            table.learn_logits(found)

    def _table_of(self, target: Target) -> SuccessorTable:
        def new(max_bytes: int) -> SuccessorTable:
            ranks = min(self.top_k, target.vocab_size)
            ways = template_of(self._child_counts, ranks)
            template = successors.Template(*ways, _EVIDENCE.priors)
            return SuccessorTable(target.vocab_size, ranks, template)

        name = f"{self.name} {target.vocab_size} {self.top_k} {[*self._child_counts]}"
        table: SuccessorTable = self.memory.table(name, target.fingerprint, new)
        return table


class _RecyclingSession(BatchSession):
    """The last token of a text, and the table that it reads and teaches."""

    def __init__(
        self, drafter: TokenRecyclingDrafter, table: SuccessorTable, prompt_ids: NDArray[np.int32]
    ) -> None:
        self.drafter, self.table = drafter, table
        self.last = int(prompt_ids[-1]) if len(prompt_ids) else _UNKNOWN
        table.learn_text(prompt_ids)


class SuccessorTable:
    """Every token's likeliest next tokens, best first, each with its evidence class.

    int32 [rows + 1, k], of which the last row stays unknown: index −1, the unknown token, reads it,
    so below an unknown node everything is unknown. A simulation may not know how large its ids are,
    so rows are added where they are missing.
    """

    def __init__(
        self, vocab_size: int, top_k: int, template: successors.Template, rows: int = _FIRST_ROWS
    ) -> None:
        self.vocab_size = vocab_size
        self.top_k = top_k
        self.template = template
        self._lock = Lock()
        self._successors, self._classes = self._unknown(min(vocab_size, rows) + 1)
        self._text_kinds = (_FIRST_TEXT_KIND + np.minimum(np.arange(top_k), 2)).astype(np.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self._successors.nbytes + self._classes.nbytes

    def _unknown(self, count: int) -> tuple[Int32Array, NDArray[np.uint8]]:
        """`count` unknown rows."""
        shape = (count, self.top_k)
        return np.full(shape, _UNKNOWN, dtype=np.int32), np.zeros(shape, dtype=np.uint8)

    def _rows_of(self, tokens: Int32Array) -> Int32Array:
        """The row of each token, made where it is missing; of −1, −1."""
        rows = self._numbers_of(tokens)
        if len(self._successors) > self.vocab_size:
            return rows  # there are all
        needed, known = int(rows.max(initial=_UNKNOWN)) + 1, len(self._successors) - 1
        if needed > known:
            table, classes = self._unknown(min(self.vocab_size, max(needed, 2 * known)) - known)
            self._successors = np.concatenate([self._successors, table])
            self._classes = np.concatenate([self._classes, classes])
        return rows

    def _numbers_of(self, tokens: Int32Array) -> Int32Array:
        """The numbers by which the table knows tokens, int32 of the same shape; of −1, −1."""
        return tokens

    def draft(self, roots: Sequence[int], budgets: Sequence[int]) -> Forest:
        """The template over the table below each of several tokens: of its known nodes the most
        probable.

        Args:
            roots: the last token of each text.
            budgets: nodes of each at most.
        """
        with self._lock:
            draft = successors.draft(
                self._successors,
                self._classes,
                self._numbers_of(np.array(roots, np.int32)),
                np.array(budgets, np.int64),
                self.template,
            )
        return Forest(*draft)

    def learn_logits(self, feedbacks: Sequence[Feedback]) -> None:
        """Overwrite the rows of the tokens that one forward fed by the top k of their logits.

        A token fed at several nodes takes the row of the last accepted one, else of the last
        rejected one.

        Args:
            feedbacks: of some rows of the forward, in their order, each with `top`.
        """
        first, *others = feedbacks
        assert first.top is not None
        fed, accepted, starts, top = first.token_ids, first.accepted, _ONE_START, first.top
        if others:
            sizes = [len(feedback.token_ids) for feedback in feedbacks]
            starts = np.array([0, *accumulate(sizes[:-1])])
            fed = np.concatenate([feedback.token_ids for feedback in feedbacks])
            accepted = np.concatenate([feedback.accepted for feedback in feedbacks])
            accepted = accepted + starts.repeat([len(one.accepted) for one in feedbacks])
            top = top.joined([feedback.top for feedback in others if feedback.top])
        limit = len(fed) if top.free else _MOST_REJECTED
        nodes = successors.rows_to_learn(
            fed, accepted.astype(np.int64), self.vocab_size, limit, starts
        )
        found, logits = top.of(nodes, self.top_k, self.vocab_size)
        with self._lock:
            rows, found = self._rows_of(fed[nodes]), self._numbers_of(found)
            successors.write(
                self._successors, self._classes, rows, found, logits, _SHARE_EDGES, _KINDS
            )

    def learn_text(self, tokens: Int32Array) -> None:
        """Move each token's successor in the text to the front of its row."""
        known = np.where(tokens < self.vocab_size, tokens, _UNKNOWN).astype(np.int32)
        with self._lock:
            numbers, rows = self._numbers_of(known), self._rows_of(known[:-1])
            order = np.argsort(rows, kind="stable")
            successors.learn_text(
                self._successors, self._classes, numbers, rows, order, self._text_kinds, _KINDS
            )


class PrivateTable(SuccessorTable):
    """What a text that must teach the table nothing has taught, beside the table.

    It numbers the tokens that it meets, so that it takes memory for those alone.

    Args:
        table: that is only read.
    """

    def __init__(self, table: SuccessorTable) -> None:
        super().__init__(table.vocab_size, table.top_k, table.template, _FIRST_PRIVATE_ROWS)
        self._table = table
        self._numbers = {_UNKNOWN: _UNKNOWN}
        self._tokens: list[int] = []

    def _numbers_of(self, tokens: Int32Array) -> Int32Array:
        for token in set(tokens.ravel().tolist()) - self._numbers.keys():
            self._numbers[token] = len(self._tokens)
            self._tokens.append(token)
        numbers = map(self._numbers.__getitem__, tokens.ravel().tolist())
        return np.fromiter(numbers, np.int32, tokens.size).reshape(tokens.shape)

    def draft(self, roots: Sequence[int], budgets: Sequence[int]) -> Forest:
        own = super().draft(roots, budgets)
        token_ids = np.array(self._tokens, np.int32)[own.token_ids]
        both = replace(own, token_ids=token_ids).merge(self._table.draft(roots, budgets))
        return both.prune(budgets)
