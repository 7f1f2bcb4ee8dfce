"""A depth-bounded, counted, path-compressed trie of the suffixes of growing token sequences.

Every suffix of every sequence is inserted down to `max_depth` tokens; a node counts the suffixes
through it (SuffixDecoding, https://arxiv.org/abs/2411.04975, section 3.1). A node is stored only where
suffixes part or stop. A suffix that shares no further token with another is a leaf, which grows with
its sequence at no cost, so that a new token moves only the suffixes that have occurred before: at most
`max_depth` of them, each in O(1).
"""

from typing import NamedTuple

import numpy as np

cimport cython
from libc.math cimport INFINITY, expf, logf
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memmove, memset

from common.heap cimport Entry, pop as heap_pop, push as heap_push
from common.offsets cimport check_offsets
from common.prefetch cimport prefetch
from common.types cimport int32_t, int64_t, token_t, uint16_t, uint32_t, uint64_t
from suffix_tree.drafting cimport Candidate, CandidateHeap, Draft
from suffix_tree.mixing cimport (
    BIAS, BOTH, CANDIDATES, CELLS, CONTEXTS, COPIES, COPY_CELL, COPY_KINDS, COPY_STATES, Cell,
    Context, Contexts, Copy, CopyNames, Expansion, GROUPS, Guess, Heard, INPUTS, KINDS, KNOWN,
    KnownNames, LONGEST, MixedDraft, MixedText, Mixture, NAMES, Named, Names, OFFSETS, ORDERS, Reading, SHARES,
    SOURCES, SUPPORTS, Sources, TABLE, Trend, Witness,
)
from suffix_tree.store cimport (
    GAP_NAMES, Gap, Group, Link, NIL, NO_ITEM, Node, PAGE_BITS, PAGE_TOKENS, Page, Place, Pool,
    ROOT, Sequence, Slot, Store, backward, fits, forward, group_at, item_count, item_depth,
    item_parent, label_end, label_token, link_at, node_at, page_at, page_of, pool_size, sequence_at,
    start_of, store_bytes, token_at, touch,
)

include "pools.pxi"
include "child_table.pxi"
include "children.pxi"
include "matching.pxi"
include "gaps.pxi"
include "growth.pxi"
include "scored_draft.pxi"
include "contexts.pxi"
include "names.pxi"
include "copying.pxi"
include "mixing.pxi"
include "mixed_draft.pxi"


MAX_DEPTH = 1 << 16

# Shapes of what a `Mixer` learns. Cells: by source, kind of context (a length, or a pair before a
# gap), support, share, whether the latest occurrence went on so. Cells of copies: by how they may go
# on, what they are like, whether the candidate is the one. Weights: common ones, then by longest order
# of the other sources, then by that of the text and its copy.
CELL_SHAPE = (SOURCES, KINDS, SUPPORTS, SHARES, 2)
COPY_SHAPE = (COPIES, COPY_KINDS, 2)
WEIGHT_SHAPE = (GROUPS, INPUTS)


cdef int32_t stores = 0

cdef int32_t next_serial() noexcept:
    """A number that no other store has."""
    global stores
    stores += 1
    return stores


cdef int check_ids(const token_t[::1] token_ids) except -1:
    cdef Py_ssize_t i
    for i in range(token_ids.shape[0]):
        if token_ids[i] < 0:
            raise ValueError(f"token_ids: expected 0 or more, got {token_ids[i]}")
    return 0


class Speculation(NamedTuple):
    """A draft: int32 `token_ids` [n], int32 `parents` [n] (−1: root), float32 `probs` [n]; the
    length of the match it continues (0: none) and its score, the sum of `probs`."""

    token_ids: np.ndarray
    parents: np.ndarray
    probs: np.ndarray
    match_length: int
    score: float


cdef class SuffixTree:
    """Suffixes of token sequences to a depth of `max_depth` tokens, with their counts.

    A token is appended in O(max_depth), whatever came before. With `max_bytes`, memory in use never
    exceeds that many bytes: `extend` stops short instead. Not safe for concurrent use.
    """

    cdef Store store
    cdef Place* matches
    cdef int32_t live

    def __cinit__(self, int max_depth=64, *, max_bytes=None):
        if not 1 <= max_depth <= MAX_DEPTH:
            raise ValueError(f"max_depth: expected 1 to {MAX_DEPTH}, got {max_depth}")
        cdef Store* s = &self.store
        pool_init(&s.nodes, sizeof(Node))
        pool_init(&s.groups, sizeof(Group))
        pool_init(&s.pages, sizeof(Page))
        pool_init(&s.sequences, sizeof(Sequence))
        s.slots = NULL
        s.gaps = NULL
        s.gap_count = s.gaps_used = 0
        s.slot_count = s.slots_used = s.max_bytes = 0
        s.max_depth, s.clock, s.serial = max_depth, 0, next_serial()
        self.matches = <Place*>malloc((max_depth + 1) * sizeof(Place))
        if self.matches == NULL or reserve_for_token(s) < 1:
            raise MemoryError
        cdef Node* root = node_at(s, pool_take(&s.nodes))
        root[0] = Node(
            parent=NIL, count=0, end=NIL, depth=0, ends=0, children=0, first_child=NIL, first_leaf=NIL,
            first_end=NIL, next=NIL, prev=NIL, group=NIL, stale=NIL, stamp=0,
        )
        if max_bytes is not None:
            if max_bytes < self.nbytes:
                raise ValueError(f"max_bytes: expected at least {self.nbytes}, got {max_bytes}")
            self.max_bytes = max_bytes

    def __dealloc__(self):
        free(self.store.nodes.data)
        free(self.store.groups.data)
        free(self.store.pages.data)
        free(self.store.sequences.data)
        free(self.store.slots)
        free(self.store.gaps)
        free(self.matches)

    @property
    def max_depth(self):
        """Longest suffix kept, in tokens."""
        return self.store.max_depth

    cdef int64_t _match_bytes(self):
        return (self.store.max_depth + 1) * <int64_t>sizeof(Place)

    @property
    def nbytes(self):
        """Bytes allocated, spare capacity included."""
        return store_bytes(&self.store) + self._match_bytes()

    @property
    def gap_bytes(self):
        """Part of `nbytes`: the table of pairs before a gap."""
        return self.store.gap_count * <int64_t>sizeof(Gap)

    @property
    def max_bytes(self):
        """Limit on `nbytes`, or None. Lowering it below `nbytes` only stops growth."""
        return self.store.max_bytes + self._match_bytes() if self.store.max_bytes else None

    @max_bytes.setter
    def max_bytes(self, limit):
        self.store.max_bytes = 0 if limit is None else max(<int64_t>limit - self._match_bytes(), 1)

    @property
    def token_count(self):
        """Tokens in all sequences."""
        return node_at(&self.store, ROOT).count

    def __len__(self):
        """Number of sequences."""
        return self.live

    def add_sequence(self):
        """Start an empty sequence and return its id, which may be a removed one's.

        Returns None where it does not fit under `max_bytes`.
        """
        cdef Store* s = &self.store
        cdef int room = pool_reserve(s, &s.sequences, 1, 2147483647)
        if room < 0:
            raise MemoryError
        if room == 0:
            return None
        cdef int32_t sequence = pool_take(&s.sequences)
        sequence_at(s, sequence)[0] = Sequence(length=0, first_page=NIL, last_page=NIL, pending=0)
        self.live += 1
        return sequence

    cdef int32_t _checked(self, int64_t sequence) except -1:
        if (not 0 <= sequence < self.store.sequences.used
                or sequence_at(&self.store, <int32_t>sequence).pending == NIL):
            raise ValueError(f"sequence: expected the id of one that is here, got {sequence}")
        return <int32_t>sequence

    def append(self, sequence, token_t token):
        """Append one token. Returns whether it fitted under `max_bytes`. O(max_depth)."""
        return self.extend(sequence, np.array([token], dtype=np.int32)) == 1

    def extend(self, sequence, const token_t[::1] token_ids):
        """Append tokens (int32 [n], not negative). Returns how many fitted under `max_bytes`."""
        cdef int32_t index = self._checked(sequence)
        check_ids(token_ids)
        return self._extend(index, token_ids, 0, token_ids.shape[0])

    def extend_all(self, list sequences, const token_t[::1] token_ids, const int64_t[::1] offsets):
        """Append to several sequences as `extend` does, one's tokens behind another's in int32 [n].

        offsets: int64 [sequences + 1], where each one's tokens begin.

        Returns how many tokens fitted under `max_bytes`; none is appended behind the first that did not.
        """
        cdef Py_ssize_t row, end = 0
        check_offsets(offsets, len(sequences), token_ids.shape[0])
        check_ids(token_ids)
        for sequence in sequences:
            self._checked(sequence)
        for row in range(len(sequences)):
            end = offsets[row] + self._extend(sequences[row], token_ids, offsets[row], offsets[row + 1])
            if end < offsets[row + 1]:
                break
        return end

    cdef Py_ssize_t _extend(
        self, int32_t sequence, const token_t[::1] token_ids, Py_ssize_t first, Py_ssize_t end
    ) except -1:
        """Append the tokens from `first` to `end`; returns how many fitted."""
        cdef Py_ssize_t i = first
        cdef int room = 1
        with nogil:
            while i < end:
                room = reserve_for_token(&self.store)
                if room < 1:
                    break
                append_token(&self.store, sequence, token_ids[i], token_ids[min(i + 1, end - 1)])
                i += 1
        if room < 0:
            raise MemoryError
        return i - first

    def remove(self, sequence):
        """Forget a sequence and its counts. O(its length x max_depth)."""
        cdef int32_t index = self._checked(sequence)
        with nogil:
            remove_sequence(&self.store, index)
        self.live -= 1

    def tokens(self, sequence):
        """The tokens of a sequence, int32 [n]."""
        cdef Sequence* q = sequence_at(&self.store, self._checked(sequence))
        cdef int32_t page = q.first_page, i
        out = np.empty(q.length, dtype=np.int32)
        cdef token_t[::1] view = out
        for i in range(q.length):
            view[i] = page_at(&self.store, page).tokens[i % PAGE_TOKENS]
            if i % PAGE_TOKENS == PAGE_TOKENS - 1:
                page = page_at(&self.store, page).next
        return out

    def last_tokens(self, sequence, int32_t count):
        """The last tokens of a sequence, int32 [n], at most so many. O(n)."""
        cdef Sequence* q = sequence_at(&self.store, self._checked(sequence))
        cdef int32_t n = min(max(count, 0), q.length), position, i
        out = np.empty(n, dtype=np.int32)
        cdef token_t[::1] view = out
        if n:
            position = (q.last_page << PAGE_BITS) + (q.length - 1) % PAGE_TOKENS
            position = backward(&self.store, position, n - 1)
        for i in range(n):
            view[i] = token_at(&self.store, position)
            if i + 1 < n:
                position = forward(&self.store, position, 1)
        return out

    cdef bint _find(self, const token_t[::1] token_ids, Place* at) noexcept:
        cdef Py_ssize_t i
        at.item, at.depth = ROOT, 0
        for i in range(token_ids.shape[0]):
            if not step(&self.store, at, token_ids[i]):
                return False
        return True

    def count(self, const token_t[::1] token_ids):
        """How often the tokens (at most `max_depth` of them) occur; all tokens, for none."""
        cdef Place at
        return item_count(&self.store, at.item) if self._find(token_ids, &at) else 0

    def children(self, const token_t[::1] token_ids):
        """(token, count) of every token that follows the given ones, by descending count."""
        cdef Place at
        cdef int32_t item, depth
        if not self._find(token_ids, &at):
            return []
        depth = at.depth + 1
        if at.depth < item_depth(&self.store, at.item):
            return [(label_token(&self.store, at.item, depth), item_count(&self.store, at.item))]
        item = first_item(&self.store, at.item) if at.item >= 0 else NO_ITEM
        found = []
        while item != NO_ITEM:
            found.append((label_token(&self.store, item, depth), item_count(&self.store, item)))
            item = next_item(&self.store, item)
        return found

    def after_gap(self, token_t first, token_t second):
        """(token, count) of what followed two tokens and any third, by descending count.

        The most frequent four, of as many pairs as the table has room for.
        """
        cdef const Gap* gap = gap_after(&self.store, second, first)
        return [] if gap == NULL else [(gap.tokens[i], gap.counts[i]) for i in range(names_of(gap))]

    def speculate(
        self, const token_t[::1] context, int max_nodes, *, double factor=1.0, double offset=0.0,
        double min_prob=0.1, bint tree=True, str convention="arctic",
    ):
        """The best continuation of the last 1, 2, .. tokens of `context` (Algorithm 1).

        A match of L tokens drafts at most min(max_nodes, L * factor + offset) nodes, the most
        probable first (`tree`) or along the most frequent children (a path), none below `min_prob`.
        A child's probability is its parent's times its count over its parent's count ("arctic") or
        over the sum of the siblings' counts ("paper", C(N)). The highest sum of probabilities
        wins, and among equals the longer match.
        """
        cdef int32_t longest
        with nogil:
            longest = match_context(&self.store, context, self.matches)
        return self._speculation(longest, max_nodes, factor, offset, min_prob, tree, convention)

    def speculate_after(
        self, sequence, int max_nodes, *, double factor=1.0, double offset=0.0,
        double min_prob=0.1, bint tree=True, str convention="arctic",
    ):
        """`speculate` with a sequence's own tokens as the context, which costs no matching."""
        cdef int32_t longest = match_sequence(
            &self.store, self._checked(sequence), self.matches)
        return self._speculation(longest, max_nodes, factor, offset, min_prob, tree, convention)

    cdef object _speculation(
        self, int32_t longest, int max_nodes, double factor, double offset, double min_prob,
        bint tree, str convention,
    ):
        cdef int32_t budget = max(max_nodes, 0), chosen
        cdef bint paper = convention == "paper"
        cdef Draft best = Draft(0, 0.0, NULL, NULL, NULL), spare = best
        if convention not in ("paper", "arctic"):
            raise ValueError(f"convention: expected 'paper' or 'arctic', got {convention!r}")
        tokens, parents = np.empty((2, budget), np.int32), np.empty((2, budget), np.int32)
        probs = np.empty((2, budget), np.float64)
        cdef token_t[:, ::1] token_rows = tokens
        cdef int32_t[:, ::1] parent_rows = parents
        cdef double[:, ::1] prob_rows = probs
        cdef CandidateHeap queue
        queue.candidates = <Candidate*>malloc((2 * budget + 1) * sizeof(Candidate))
        queue.entries = <Entry*>malloc((2 * budget + 1) * sizeof(Entry))
        if queue.candidates == NULL or queue.entries == NULL:
            free(queue.candidates)
            free(queue.entries)
            raise MemoryError
        if budget:
            best.tokens, spare.tokens = &token_rows[0, 0], &token_rows[1, 0]
            best.parents, spare.parents = &parent_rows[0, 0], &parent_rows[1, 0]
            best.probs, spare.probs = &prob_rows[0, 0], &prob_rows[1, 0]
        with nogil:
            chosen = speculate(
                &self.store, self.matches, longest, budget, factor, offset, min_prob, tree, paper,
                &queue, &best, &spare,
            )
        free(queue.candidates)
        free(queue.entries)
        row = 1 if budget and best.tokens == &token_rows[1, 0] else 0
        return Speculation(
            tokens[row, :best.size], parents[row, :best.size],
            probs[row, :best.size].astype(np.float32), chosen, best.score,
        )

    def check_invariants(self):
        """Raise AssertionError where the structure contradicts itself. For tests: slow."""
        cdef int32_t node, children = 0, nodes = 0
        cdef Store* s = &self.store
        waiting = [ROOT]
        while waiting:
            node = waiting.pop()
            nodes += 1
            items = self._items(node)
            self._check_counts(node, items)
            self._check_siblings(node)
            for item in items:
                assert item_parent(s, item) == node, "a child of another node"
                assert item_depth(s, item) > node_at(s, node).depth, "an edge without a token"
                assert self._label(item)[:node_at(s, node).depth] == self._label(node), "labels"
                assert child_of(s, node, label_token(s, item, node_at(s, node).depth + 1)) == item
            children += len(items) if branches(s, node) else 0
            waiting.extend(item for item in items if item >= 0)
        assert nodes == pool_size(&s.nodes), "nodes that are not in the tree"
        assert children == s.slots_used, "table entries that are not in the tree"
        assert 2 * pool_size(&s.groups) <= nodes, "groups of fewer than two"
        assert nodes <= 2 * s.groups.capacity, "no room for the groups that removals may make"
        self._check_sequences()
        self._check_gaps()

    cdef object _check_gaps(self):
        cdef Store* s = &self.store
        cdef Gap* gap
        cdef int32_t i, used = 0
        for i in range(s.gap_count):
            gap = &s.gaps[i]
            used += gap.tag != 0
            counts = [gap.counts[k] for k in range(GAP_NAMES)]
            named = [gap.tokens[k] for k in range(GAP_NAMES) if counts[k]]
            assert counts == sorted(counts, reverse=True), "continuations out of order"
            assert sum(counts) <= gap.total, "more continuations than were counted"
            assert len(set(named)) == len(named), "a continuation counted twice"
        assert used == s.gaps_used, "entries are counted wrong"

    cdef list _items(self, int32_t node):
        cdef int32_t item = first_item(&self.store, node)
        found = []
        while item != NO_ITEM:
            found.append(item)
            item = next_item(&self.store, item)
        return found

    cdef list _label(self, int32_t item):
        cdef int32_t depth
        return [
            label_token(&self.store, item, depth)
            for depth in range(1, item_depth(&self.store, item) + 1)
        ]

    cdef object _check_counts(self, int32_t node, list items):
        cdef Node* v = node_at(&self.store, node)
        cdef int32_t end = v.first_end, ends = 0
        counts = [item_count(&self.store, item) for item in items]
        while end != NIL:
            assert link_at(&self.store, end).node == ~node, "an end of another node"
            ends += 1
            end = link_at(&self.store, end).next
        assert v.children == len(items), "children are counted wrong"
        assert v.ends == ends, "ends are counted wrong"
        assert v.count == ends + sum(counts), "a count that its items do not add up to"
        assert counts == sorted(counts, reverse=True), "children out of order"
        assert node == ROOT or ends + len(items) > 1, "a node without need"
        assert v.stale == NIL, "a label left unread"

    cdef object _check_siblings(self, int32_t node):
        cdef Store* s = &self.store
        cdef int32_t child = node_at(s, node).first_child, last = NIL
        run = []
        while child != NIL:
            if run and node_at(s, child).count != node_at(s, run[0]).count:
                self._check_group(run)
                run = []
            run.append(child)
            last = child
            child = node_at(s, child).next
        if run:
            self._check_group(run)
            assert node_at(s, node_at(s, node).first_child).prev == last, "the last sibling"

    cdef object _check_group(self, list equals):
        cdef Store* s = &self.store
        cdef int32_t group = node_at(s, equals[0]).group
        assert {node_at(s, node).group for node in equals} == {group}, "a divided group"
        assert (group == NIL) == (len(equals) == 1), "a group of one, or none of several"
        if group != NIL:
            assert group_at(s, group).first == equals[0], "a group that starts elsewhere"
            assert group_at(s, group).last == equals[len(equals) - 1], "a group that stops elsewhere"

    cdef object _check_sequences(self):
        cdef Store* s = &self.store
        cdef int32_t i, j, position, node, total = 0, pages = 0, length
        for i in range(s.sequences.used):
            if sequence_at(s, i).pending == NIL:
                continue
            length = sequence_at(s, i).length
            total += length
            pages += (length + PAGE_TOKENS - 1) // PAGE_TOKENS
            for j in range(length):
                position = forward(s, sequence_at(s, i).first_page << PAGE_BITS, j)
                assert start_of(s, position) == j, "pages out of order"
                node = link_at(s, position).node
                if node < 0 and node_at(s, ~node).depth < s.max_depth:
                    assert j >= sequence_at(s, i).pending, "a suffix that would not move"
                    assert node_at(s, ~node).depth == length - j, "a suffix that stops too early"
                else:
                    assert j < sequence_at(s, i).pending, "a suffix that cannot move"
        assert total == node_at(s, ROOT).count, "tokens are counted wrong"
        assert pages == pool_size(&s.pages), "pages that are not in the tree"


include "mixer.pxi"
