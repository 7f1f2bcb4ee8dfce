"""Token Recycling: the most likely successors of every token, remembered from earlier logits.

Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token
Recycling" (2024), sections 3.1 to 3.3. A table [vocab_size, k] holds, for every token, the k tokens
that the target found most likely after it the last time it was fed. A static tree of ranks is laid
over the table to draft.

What the target nearly said instead of the last token often is what it says next (LogitSpec, Liu et
al. 2025, https://arxiv.org/abs/2507.01449), so that those tokens may be drafted below it too. They
stand in the table, as successors of the token before.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ..structures import successors
from ..system.locks import Lock
from ..token_tree import Float32Array, Forest, Int32Array, TokenTree
from .base import Drafter, DraftSession, Feedback, FeedbackNeeds, Target

Rows = tuple[Int32Array, NDArray[np.uint8]]
OwnRows = tuple[Int32Array, Int32Array, NDArray[np.uint8]]

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
# The same of what the last logits ranked behind the last token, by rank: where the row of the last
# token is unknown, and where it is known.
_LAST_LOGITS_RANKS = 8
_LAST_LOGITS_PRIORS = np.array(
    [
        [0.05, 0.035, 0.03, 0.03, 0.025, 0.015, 0.012, 0.012],
        [0.03, 0.028, 0.014, 0.014, 0.01, 0.007, 0.007, 0.004],
    ],
    dtype=np.float32,
)
_FIRST_LAST_LOGITS = _PRIORS.size
_RATES = np.concatenate([_PRIORS.ravel(), _LAST_LOGITS_PRIORS.ravel()])
# All of them, the first ones with the two likeliest tokens after each.
_LAST_LOGITS_TREE = (*(8,), *(1, 1, 1, 1, 1, 0, 0, 0), *(1, 1, 1, 1, 1), *(0, 0, 0, 0, 0))
_KINDS = _PRIORS.shape[1]
_FIRST_TEXT_KIND = len(_SHARE_EDGES) + 1
_UNKNOWN = -1
# Rejected nodes learnt per step where a top k is not free.
_MOST_REJECTED = 16
# Rows made at first; more than any real vocabulary needs.
_FIRST_ROWS = 1 << 20


class Template:
    """A tree of ranks: node "rank r below p" stands for the r-th likeliest successor of p's token.

    Attributes:
        parents: int32 [n], −1 for children of the root, −2 for those of them that follow the token
            before it (see `beside`); levels stand together, in order.
        ranks: int32 [n].
    """

    def __init__(self, child_counts: Sequence[int], top_k: int) -> None:
        """
        Args:
            child_counts: children of each node, breadth first, the root's first. Children take the
                ranks 0, 1, ...; so the counts determine the tree.
            top_k: ranks the table has; nodes of higher rank are left out with all below them.

        Raises:
            ValueError: the counts do not describe one whole tree.
        """
        nodes = _expand_counts(child_counts)
        keep = _below(top_k, nodes)
        place = {old: new for new, old in enumerate(keep)} | {-1: -1}
        self.parents = np.array([place[nodes[i][0]] for i in keep], dtype=np.int32)
        self.ranks = np.array([nodes[i][1] for i in keep], dtype=np.int32)

    def beside(self, last: Template) -> Template:
        """Both, the children of the second one's root marked as successors of the token before."""
        both = copy.copy(self)
        moved = np.where(last.parents < 0, -2, last.parents + len(self.parents)).astype(np.int32)
        both.parents = np.concatenate([self.parents, moved])
        both.ranks = np.concatenate([self.ranks, last.ranks])
        return both


def _expand_counts(child_counts: Sequence[int]) -> list[tuple[int, int]]:
    """(parent, rank) of every node below the root, breadth first."""
    counts = [int(count) for count in child_counts]
    if not counts or min(counts) < 0 or sum(counts) != len(counts) - 1:
        raise ValueError(
            "template: expected one non-negative child count per node, the root's first, and as "
            f"many nodes as children plus the root; got {len(counts)} counts with sum {sum(counts)}"
        )
    nodes: list[tuple[int, int]] = []
    for node, count in enumerate(counts):
        if node > len(nodes):
            raise ValueError(f"template: node {node} has a child count but no parent")
        nodes += [(node - 1, rank) for rank in range(count)]
    return nodes


def _below(top_k: int, nodes: list[tuple[int, int]]) -> list[int]:
    """The nodes whose whole path has ranks below `top_k`."""
    kept: set[int] = {-1}
    for node, (parent, rank) in enumerate(nodes):
        if parent in kept and rank < top_k:
            kept.add(node)
    return sorted(kept - {-1})


class TokenRecyclingDrafter(Drafter):
    """Drafts from the target's own second thoughts; needs no text, corpus or second model.

    The table is shared by all sessions, stays warm from call to call, and belongs to one target: a
    model with another fingerprint gets a table of its own.

    Rows come from the logits of verified nodes, rejected ones included, and from the prompt's where
    the engine has them. Before that the prompt itself teaches which token follows which, and so
    does the output where there are no logits, as in a simulation: the successor moves to the front
    of its row.
    """

    name = "token_recycling"

    def __init__(
        self,
        top_k: int = 8,
        template: str | Sequence[int] = "2.2.2",
        last_logits: bool = False,
    ) -> None:
        """
        Args:
            top_k: successors kept per token; the whole vocabulary where it is smaller.
            template: "2.2.2" (80 nodes, the authors'), "sam" (60 nodes, SAM-Decoding's), or the
                child counts of a tree, breadth first from the root.
            last_logits: draft below the last token also what its own logits put behind it.

        Raises:
            ValueError: `top_k` is not positive or `template` is not a tree.
        """
        if top_k < 1:
            raise ValueError(f"top_k: expected a positive number, got {top_k}")
        self.top_k = top_k
        self.needs = FeedbackNeeds(top_k=top_k)
        self.last_logits = last_logits
        self._child_counts = _child_counts(template)
        Template(self._child_counts, top_k)  # refuses counts that are no tree
        self._tables: dict[tuple[str, int], SuccessorTable] = {}
        self._lock = Lock()

    def start(self, prompt_ids: NDArray[np.int32], target: Target) -> DraftSession:
        table = self._table_of(target)
        if target.expected or target.forms or not target.learn:
            # What a caller expects is told in confidence, and so is what comes of it.
            table = PrivateTable(table)
        for expected in target.expected:
            table.learn_text(expected)
        return _RecyclingSession(table, prompt_ids, self.last_logits)

    def propose_rows(
        self, sessions: Sequence[_RecyclingSession], budgets: Sequence[int]
    ) -> Sequence[TokenTree]:
        table = sessions[0].table
        if any(session.table is not table for session in sessions):
            return super().propose_rows(sessions, budgets)
        ends = [session.ends for session in sessions]
        return table.draft([last for last, _ in ends], [before for _, before in ends], budgets)

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
                session.commit(token_ids, None)
            else:
                told.setdefault(session.table, []).append(feedback)
                session.follow(token_ids)
        for table, found in told.items():
            table.learn_logits(found)

    def reset(self) -> None:
        """Forget every row. Sessions under way keep what they started with."""
        with self._lock:
            self._tables.clear()

    def priors(self) -> Float32Array:
        return _RATES

    @property
    def origins(self) -> tuple[str, ...]:
        return ("token recycling", "last logits")

    def origins_of(self, classes: Int32Array) -> Int32Array:
        return (classes >= _FIRST_LAST_LOGITS).astype(np.int32)

    def _table_of(self, target: Target) -> SuccessorTable:
        key = (target.fingerprint, target.vocab_size)
        with self._lock:
            if key not in self._tables:
                ranks = min(self.top_k, target.vocab_size)
                last_logits = Template(_LAST_LOGITS_TREE, ranks)
                template = Template(self._child_counts, ranks).beside(last_logits)
                laid = successors.Template(
                    template.parents,
                    template.ranks,
                    _RATES,
                    _KINDS,
                    _FIRST_TEXT_KIND,
                    _FIRST_LAST_LOGITS,
                    _LAST_LOGITS_RANKS,
                )
                self._tables[key] = SuccessorTable(target.vocab_size, ranks, laid)
            return self._tables[key]


def _child_counts(template: str | Sequence[int]) -> Sequence[int]:
    if not isinstance(template, str):
        return template
    if template not in TEMPLATES:
        raise ValueError(f"template: expected one of {sorted(TEMPLATES)}, got {template!r}")
    return TEMPLATES[template]


class _RecyclingSession(DraftSession):
    def __init__(
        self, table: SuccessorTable, prompt_ids: NDArray[np.int32], last_logits: bool
    ) -> None:
        self.table = table
        self._last_logits = last_logits
        self._before, self._last = [_UNKNOWN, _UNKNOWN, *prompt_ids[-2:].tolist()][-2:]
        table.learn_text(prompt_ids)

    @property
    def ends(self) -> tuple[int, int]:
        """The last token, and the one before it where its logits are drafted from, else −1."""
        return self._last, self._before if self._last_logits else _UNKNOWN

    def propose(self, budget: int) -> TokenTree:
        last, before = self.ends
        return self.table.draft([last], [before], [budget])[0]

    def commit(self, token_ids: Sequence[int], feedback: Feedback | None) -> None:
        if feedback is None or feedback.top is None:
            self.table.learn_text(np.array([self._last, *token_ids], dtype=np.int32))
        else:
            self.table.learn_logits([feedback])
        self.follow(token_ids)

    def follow(self, token_ids: Sequence[int]) -> None:
        """The text went on with these tokens, of which the table learns from elsewhere."""
        self._before, self._last = [self._last, *token_ids][-2:]


class SuccessorTable:
    """For every token the likeliest next tokens, best first, each with its evidence class.

    int32 [ids + 1, k], of which the last row stays unknown: index −1, the unknown token, reads it,
    so below an unknown node everything is unknown.
    """

    def __init__(self, vocab_size: int, top_k: int, template: successors.Template) -> None:
        self._vocab_size = vocab_size
        self._top_k = top_k
        self._template = template
        self._lock = Lock()
        self._successors, self._classes = self._unknown(self._first_rows() + 1)
        self._text_kinds = (_FIRST_TEXT_KIND + np.minimum(np.arange(top_k), 2)).astype(np.uint8)

    def _first_rows(self) -> int:
        return min(self._vocab_size, _FIRST_ROWS)

    def _unknown(self, count: int) -> Rows:
        """`count` unknown rows."""
        shape = (count, self._top_k)
        return np.full(shape, _UNKNOWN, dtype=np.int32), np.zeros(shape, dtype=np.uint8)

    def _rows_of(self, tokens: Int32Array) -> Int32Array:
        """int32 [n], the row to learn each token in, made where it is missing; of −1, −1.

        A simulation may not know how large its ids are.
        """
        ids, known = int(tokens.max(initial=_UNKNOWN)) + 1, len(self._successors) - 1
        if ids > known:
            table, classes = self._unknown(1 + min(self._vocab_size, max(ids, 2 * known)))
            table[:known] = self._successors[:known]
            classes[:known] = self._classes[:known]
            self._successors, self._classes = table, classes
        return tokens

    def _arrays(self) -> tuple[Rows, OwnRows | None]:
        """The table, and rows that stand for others of it."""
        return (self._successors, self._classes), None

    def draft(self, roots: Sequence[int], befores: Sequence[int], budgets: Sequence[int]) -> Forest:
        """The template over the table below each of several tokens: of its known nodes the most
        probable.

        With the token before a root, which was chosen from its logits, also what else those
        ranked high, and what is likeliest to follow; nothing where text alone has taught them.

        Args:
            roots: the last token of each text.
            befores: the one before it; −1: unknown, or not to be looked at.
            budgets: nodes of each at most.
        """
        with self._lock:
            rows, own = self._arrays()
            draft = successors.draft(
                *rows,
                np.array(roots, np.int32),
                np.array(befores, np.int32),
                np.array(budgets, np.int64),
                self._template,
                own,
            )
        return Forest(*draft)

    def learn_logits(self, feedbacks: Sequence[Feedback]) -> None:
        """Overwrite the rows of the tokens that one forward fed by the top k of their logits.

        A token fed at several nodes takes the row of the last accepted one, else of the last
        rejected one.

        Args:
            feedbacks: of some rows of the forward, in their order, each with `top`.
        """
        sizes = [len(feedback.token_ids) for feedback in feedbacks]
        starts = np.array([0, *accumulate(sizes[:-1])])
        fed = np.concatenate([feedback.token_ids for feedback in feedbacks])
        accepted = np.concatenate(
            [feedback.accepted + first for feedback, first in zip(feedbacks, starts, strict=True)]
        )
        first_top, *other_tops = (feedback.top for feedback in feedbacks if feedback.top)
        top = first_top.joined(other_tops) if other_tops else first_top
        limit = len(fed) if top.free else _MOST_REJECTED
        nodes = successors.rows_to_learn(fed, accepted, self._vocab_size, limit, starts)
        found, logits = top.of(nodes, self._top_k, self._vocab_size)
        with self._lock:
            rows = self._rows_of(fed[nodes])
            successors.write(
                self._successors, self._classes, rows, found, logits, _SHARE_EDGES, _KINDS
            )

    def learn_text(self, tokens: Int32Array) -> None:
        """Move each token's successor in the text to the front of its row."""
        known = np.where(tokens < self._vocab_size, tokens, _UNKNOWN).astype(np.int32)
        with self._lock:
            rows = self._rows_of(known[:-1])
            order = np.argsort(rows, kind="stable")
            successors.learn_text(
                self._successors, self._classes, known, rows, order, self._text_kinds, _KINDS
            )


class PrivateTable(SuccessorTable):
    """A table as one text sees it that must teach it nothing.

    What the text teaches goes to rows of its own, which stand for the table's; they take the memory
    of the tokens that the text has.

    Args:
        table: that is only read.
    """

    def __init__(self, table: SuccessorTable) -> None:
        self._table = table
        super().__init__(table._vocab_size, table._top_k, table._template)
        # One lock, since a draft reads both.
        self._lock = table._lock
        # The row of each id plus 1; pages that no id touches take no memory.
        self._own = np.zeros(0, np.int32)
        self._used = 0

    def _first_rows(self) -> int:
        return 63

    def _rows_of(self, tokens: Int32Array) -> Int32Array:
        fresh = np.unique(tokens[tokens >= 0])
        if len(fresh) and fresh[-1] >= len(self._own):
            ids = min(self._vocab_size, max(_FIRST_ROWS, 2 * int(fresh[-1]) + 1))
            own = np.zeros(ids, np.int32)
            own[: len(self._own)] = self._own
            self._own = own
        fresh = fresh[self._own[fresh] == 0]
        if len(fresh):
            self._adopt(fresh)
        return np.where(tokens >= 0, self._own[tokens] - 1, _UNKNOWN).astype(np.int32)

    def _adopt(self, tokens: Int32Array) -> None:
        """Begin the rows of these tokens as the table's are."""
        end = self._used + len(tokens)
        if end > len(self._successors):
            table, classes = self._unknown(max(end, 2 * len(self._successors)))
            table[: self._used] = self._successors[: self._used]
            classes[: self._used] = self._classes[: self._used]
            self._successors, self._classes = table, classes
        rows = slice(self._used, end)
        known = tokens < len(self._table._successors) - 1
        self._successors[rows][known] = self._table._successors[tokens[known]]
        self._classes[rows][known] = self._table._classes[tokens[known]]
        self._own[tokens] = np.arange(self._used + 1, end + 1)
        self._used = end

    def _arrays(self) -> tuple[Rows, OwnRows | None]:
        return self._table._arrays()[0], (self._own, self._successors, self._classes)
