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
from libc.math cimport ceil, expf, logf
from libc.stdlib cimport free
from libc.string cimport memcpy, memmove, memset

from common.blocks cimport owned, resized
from common.heap cimport Entry, pop as heap_pop, push as heap_push
from common.checks cimport check_ids, check_offsets
from common.prefetch cimport prefetch
from common.types cimport int8_t, int32_t, int64_t, token_t, uint8_t, uint16_t, uint32_t, uint64_t

include "suffix_tree/store.pxi"
include "suffix_tree/growth.pxi"
include "suffix_tree/scored.pxi"
include "suffix_tree/evidence.pxi"
include "suffix_tree/mixing.pxi"


MAX_DEPTH = 1 << 16

# Shapes of what a `Mixer` learns. Cells: by source, kind of context (a length, or a pair before a
# gap), support, share, whether the latest occurrence went on so. Cells of copies: by how they may go
# on, what they are like, whether the candidate is the one. Weights: common ones, then by longest order
# of the other sources, then by that of the text and its copy.
CELL_SHAPE = (SOURCES, KINDS, SUPPORTS, SHARES, 2)
COPY_SHAPE = (COPIES, COPY_KINDS, 2)
WEIGHT_SHAPE = (GROUPS, INPUTS)


cdef int32_t stores = 0  # that there have been


class Speculation(NamedTuple):
    """A draft: int32 `token_ids` [n], int32 `parents` [n] (−1: root), float32 `probs` [n]; the
    length of the match it continues (0: none) and its score: the sum of `probs`, and 1 for the match."""

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

    def __cinit__(self, int max_depth=64, *, max_bytes=None):
        global stores
        if not 1 <= max_depth <= MAX_DEPTH:
            raise ValueError(f"max_depth: expected 1 to {MAX_DEPTH}, got {max_depth}")
        cdef Store* s = &self.store
        s.nodes, s.groups = empty_pool(sizeof(Node)), empty_pool(sizeof(Group))
        s.pages, s.sequences = empty_pool(sizeof(Page)), empty_pool(sizeof(Sequence))
        stores += 1
        s.max_depth, s.serial = max_depth, stores
        reserve_for_token(s)
        cdef Node* root = node_at(s, pool_take(&s.nodes))
        memset(root, NIL, sizeof(Node))
        root.count = root.depth = root.ends = root.children = 0
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

    @property
    def max_depth(self):
        """Longest suffix kept, in tokens."""
        return self.store.max_depth

    @property
    def nbytes(self):
        """Bytes allocated, spare capacity included."""
        return store_bytes(&self.store)

    @property
    def max_bytes(self):
        """Limit on `nbytes`, or None. Lowering it below `nbytes` only stops growth."""
        return self.store.max_bytes or None

    @max_bytes.setter
    def max_bytes(self, limit):
        self.store.max_bytes = 0 if limit is None else max(limit, 1)

    @property
    def token_count(self):
        """Tokens in all sequences."""
        return node_at(&self.store, ROOT).count

    def __len__(self):
        """Number of sequences."""
        return pool_size(&self.store.sequences)

    def add_sequence(self):
        """Start an empty sequence and return its id, which may be a removed one's.

        Returns None where it does not fit under `max_bytes`.
        """
        cdef Store* s = &self.store
        if not pool_reserve(s, &s.sequences, 1, 2147483647):
            return None
        cdef int32_t sequence = pool_take(&s.sequences)
        sequence_at(s, sequence)[0] = Sequence(length=0, first_page=NIL, last_page=NIL, pending=0)
        return sequence

    cdef int32_t _checked(self, int64_t sequence) except -1:
        if (not 0 <= sequence < self.store.sequences.used
                or sequence_at(&self.store, <int32_t>sequence).pending == NIL):
            raise ValueError(f"sequence: expected the id of one that is here, got {sequence}")
        return <int32_t>sequence

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
        with nogil:
            while i < end and reserve_for_token(&self.store):
                append_token(&self.store, sequence, token_ids[i], token_ids[min(i + 1, end - 1)])
                i += 1
        return i - first

    def remove(self, sequence):
        """Forget a sequence and its counts. O(its length x max_depth)."""
        cdef int32_t index = self._checked(sequence)
        with nogil:
            remove_sequence(&self.store, index)

    def tokens(self, sequence):
        """The tokens of a sequence, int32 [n]."""
        return self.last_tokens(sequence, sequence_at(&self.store, self._checked(sequence)).length)

    def last_tokens(self, sequence, int32_t count):
        """The last tokens of a sequence, int32 [n], at most so many. O(n)."""
        cdef Sequence* q = sequence_at(&self.store, self._checked(sequence))
        cdef int32_t n = min(max(count, 0), q.length), position, i
        out = np.empty(n, dtype=np.int32)
        cdef token_t[::1] view = out
        position = (q.last_page << PAGE_BITS) + (q.length - 1) % PAGE_TOKENS
        for i in range(n - 1, -1, -1):
            view[i] = token_at(&self.store, position)
            if i:
                position = backward(&self.store, position, 1)
        return out

    def children(self, const token_t[::1] token_ids):
        """(token, count) of every token that follows the given ones, by descending count."""
        cdef Place at
        cdef Py_ssize_t i
        cdef int32_t item, depth
        at.item, at.depth = ROOT, 0
        for i in range(token_ids.shape[0]):
            if not step(&self.store, &at, token_ids[i]):
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

    def speculate(
        self, const token_t[::1] context, int max_nodes, *, sequence=None, double alpha=4.0
    ):
        """The best continuation of the last 1, 2, .. tokens of `context` (Algorithm 1).

        A match of p tokens makes a tree of at most alpha * p nodes, the matched one counted, and at
        most `max_nodes` besides that, the most probable first. A child's probability is its parent's
        times its count over the sum of the siblings' counts, the paper's C(N). The highest sum of
        probabilities wins, and among equals the shorter match. A sequence's own tokens, by its id,
        may take the context's place, which costs no matching.
        """
        cdef int32_t own = NIL if sequence is None else self._checked(sequence)
        cdef int32_t most = max(max_nodes, 0), chosen
        cdef size_t room = 2 * <size_t>most + 1
        tokens, parents = np.empty((2, most + 1), np.int32), np.empty((2, most + 1), np.int32)
        probs = np.empty((2, most + 1), np.float64)
        cdef int32_t[:, ::1] token_rows = tokens, parent_rows = parents
        cdef double[:, ::1] prob_rows = probs
        cdef Search q
        q.store, q.most = &self.store, most
        q.alpha = alpha
        q.best = ScoredDraft(0, 0.0, &token_rows[0, 0], &parent_rows[0, 0], &prob_rows[0, 0])
        q.spare = ScoredDraft(0, 0.0, &token_rows[1, 0], &parent_rows[1, 0], &prob_rows[1, 0])
        q.candidates = <Option*>resized(
            NULL, room * (sizeof(Option) + sizeof(Entry)) + self.store.max_depth * sizeof(Place)
        )
        q.queue = <Entry*>(q.candidates + room)
        q.matches = <Place*>(q.queue + room)
        with nogil:
            chosen = search(&q, context, own)
        free(q.candidates)
        row = int(q.best.tokens == &token_rows[1, 0])
        return Speculation(
            tokens[row, :q.best.size], parents[row, :q.best.size],
            probs[row, :q.best.size].astype(np.float32), chosen, q.best.score,
        )


include "suffix_tree/mixer.pxi"
