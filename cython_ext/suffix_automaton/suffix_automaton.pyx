"""Suffix automaton of a growing text, in flat arrays.

Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985), built online.
The first transition of every state follows its earliest occurrence in the text, so its token is
never stored; only the root's transitions and those beyond a state's first stand in hash tables.
There are fewer of the latter than tokens.
"""

import numpy as np

cimport cython
from libc.stdlib cimport free
from libc.string cimport memset

from common.blocks cimport resized
from common.checks cimport check_ids
from common.heap cimport Entry, pop, push
from common.sort cimport key_value, sort, sort_key
from common.types cimport int32_t, int64_t, state_t, token_t, uint32_t, uint64_t

include "suffix_automaton/automaton.pxi"
include "suffix_automaton/drafting.pxi"

cdef enum:
    GIL_FREE = 1024  # tokens from which giving up the GIL is worth a possible wait to get it back


cdef class SuffixAutomaton:
    """All substrings of a text that grows at its end.

    Time: O(1) amortised per token appended or matched, for any text. Memory per token: 16 bytes,
    28 per clone (at most one per token; about 0.4 on real text), about 32 per branching transition
    (at most one per token) and 8 more per state once frozen. While an array grows, its old and new
    copies may coexist, so the peak is up to 2.25 times the array that grows; a capacity hint avoids that
    for the positions.

    Appending needs exclusive use. Cursors over a frozen automaton may run in any number of threads.
    After a MemoryError in `extend` the automaton must not be used any more.

    Args:
        capacity: tokens to reserve room for.
        refresh: how many suffixes of the text each append marks as having occurred at its end. This
            bounds how far `Cursor.latest` may lag behind.

    Raises:
        ValueError: a negative argument.
    """

    cdef Automaton a
    cdef bint _frozen

    def __cinit__(self, int64_t capacity=0, int32_t refresh=8):
        memset(&self.a, 0, sizeof(Automaton))
        if capacity < 0:
            raise ValueError(f"capacity: expected at least 0, got {capacity}")
        if refresh < 0:
            raise ValueError(f"refresh: expected at least 0, got {refresh}")
        allocate_slots(&self.a.root, 4)
        allocate_slots(&self.a.branches, 4)
        set_capacity(&self.a, max(capacity, <int64_t>FIRST_CAPACITY), 0)
        self.a.refresh = refresh
        self.a.n = -1
        push_position(&self.a, SEPARATOR)
        self._frozen = False

    def __dealloc__(self):
        free(self.a.positions)
        free(self.a.clones)
        free(self.a.root.slots)
        free(self.a.branches.slots)
        if self.a.counts != NULL:
            free(self.a.counts - self.a.clone_count)

    def __len__(self):
        """Tokens and separators."""
        return self.a.n

    cdef int _append_all(self, const token_t[::1] token_ids, Match* match) except -1 nogil:
        cdef Py_ssize_t i
        for i in range(token_ids.shape[0]):
            if match != NULL:
                advance(&self.a, match, token_ids[i])
            append(&self.a, token_ids[i])
        return 0

    def extend(self, const token_t[::1] token_ids, Cursor cursor=None):
        """Append tokens (int32 [n], not negative) to the text.

        Args:
            cursor: advanced over each token just before that is appended, so that it ends at the
                longest suffix of the text that occurred earlier. The other order would match the
                text with itself.

        Raises:
            TypeError, ValueError: tokens that are not such ids; a cursor of another automaton; the
                automaton is frozen. Nothing is appended then.
        """
        cdef Match* match = NULL
        self._require_growing()
        check_ids(token_ids)
        if cursor is not None:
            if cursor.automaton is not self:
                raise ValueError("cursor: expected one over this automaton, got one over another")
            match = &cursor.match
        if token_ids.shape[0] < GIL_FREE:
            self._append_all(token_ids, match)
        else:
            with nogil:
                self._append_all(token_ids, match)

    def end_document(self):
        """Append a separator, which matches nothing: no match or draft crosses it. O(1).

        Raises:
            ValueError: the automaton is frozen.
        """
        self._require_growing()
        make_room(&self.a)
        refresh_latest(&self.a)
        push_position(&self.a, SEPARATOR)

    cdef _require_growing(self):
        if self._frozen:
            raise ValueError("expected a growing automaton, got a frozen one")

    def freeze(self):
        """End the text: count occurrences, find the latest ones, give back spare room. O(n log n).

        Needed by `Cursor.draft_tree`; makes `Cursor.latest` exact.
        """
        if self._frozen:
            return
        with nogil:
            count_occurrences(&self.a)
            self._frozen = True
            sort_all_branches(&self.a)
            set_capacity(&self.a, self.a.n, self.a.clone_count)

    @property
    def nbytes(self):
        """Bytes allocated."""
        cdef Automaton* a = &self.a
        cdef int64_t counted = 0 if a.counts == NULL else a.n + 1 + a.clone_count
        return (
            (a.capacity + 2) * sizeof(Position)
            + a.clone_capacity * sizeof(Clone)
            + (a.root.capacity + a.branches.capacity) * sizeof(Slot)
            + counted * sizeof(int32_t)
        )

    def tokens(self):
        """int32 [len], the text; −1 at separators."""
        out = np.empty(self.a.n, dtype=np.int32)
        cdef int32_t[::1] view = out
        cdef int64_t i
        for i in range(self.a.n):
            view[i] = self.a.positions[i + 1].token
        return out

    def cursor(self):
        """A new cursor at the empty match."""
        return Cursor(self)


cdef class Cursor:
    """The longest suffix of the tokens seen that occurs in an automaton's text.

    After `extend(tokens, cursor)` from an empty text on: the longest suffix of the text that also
    occurs earlier in it.

    Attributes:
        automaton: what it matches against.
    """

    cdef readonly SuffixAutomaton automaton
    cdef Match match

    def __cinit__(self, SuffixAutomaton automaton not None):
        self.automaton = automaton
        self.match.state, self.match.length = ROOT, 0

    def advance(self, token_t token):
        """Match one more token. O(1) amortised. Returns the new length.

        Raises:
            ValueError: a negative token.
        """
        if token < 0:
            raise ValueError(f"token: expected at least 0, got {token}")
        advance(&self.automaton.a, &self.match, token)
        return self.match.length

    def advance_all(self, const token_t[::1] token_ids):
        """Match tokens (int32 [n], not negative) one after the other. Returns the new length."""
        cdef Py_ssize_t i
        check_ids(token_ids)
        for i in range(token_ids.shape[0]):
            advance(&self.automaton.a, &self.match, token_ids[i])
        return self.match.length

    @property
    def length(self):
        """Tokens matched."""
        return self.match.length

    @property
    def earliest(self):
        """How many tokens of the text end with the match's first occurrence; 0 without a match."""
        normalise(&self.automaton.a, &self.match)
        return earliest_end(&self.automaton.a, self.match.state)

    @property
    def latest(self):
        """The same for a late occurrence: a true one, never before the earliest.

        Exact on a frozen automaton. On a growing one it is the latest but for the end of the text, if
        at the time of that occurrence the match was one of the `refresh` longest suffixes with
        other occurrences; else it may be an earlier one.
        """
        normalise(&self.automaton.a, &self.match)
        return state_at(&self.automaton.a, self.match.state).latest

    def draft(self, int64_t limit, bint latest=False):
        """The tokens after an occurrence of the match, or of a shorter suffix of it.

        While fewer than `limit` tokens follow, shorter suffixes are looked at, which occur earlier;
        the first with the most followers is taken.

        Args:
            limit: at most so many.
            latest: take the late occurrence instead of the earliest.

        Returns:
            int32 [0 .. limit], ending where the text or the document does.
        """
        cdef const Automaton* a = &self.automaton.a
        cdef int64_t end = 0, n, i
        normalise(a, &self.match)
        n = continuation(a, self.match, limit, latest, &end)
        out = np.empty(n, dtype=np.int32)
        cdef int32_t[::1] view = out
        for i in range(n):
            view[i] = a.positions[end + 1 + i].token
        return out

    def draft_tree(self, int64_t limit, int64_t max_children=8, double min_prob=0.0):
        """The most frequent continuations of the match as a tree, best first.

        The `samd_sam_only` tree of SAM-Decoding: path products of the shares of a parent's occurrences
        that go on with a node order the nodes.

        Args:
            limit: at most so many nodes.
            max_children: the most children of a node, the most frequent ones.
            min_prob: nodes whose product is less are left out.

        Returns:
            What `SuffixMatcher.select` returns of a suffix array.

        Raises:
            ValueError: the automaton is not frozen; limit or max_children is below 0.
        """
        cdef Frontier f
        cdef size_t room
        if not self.automaton._frozen:
            raise ValueError("expected a frozen automaton, got a growing one")
        if limit < 0 or max_children < 0:
            raise ValueError(f"limit, max_children: expected at least 0, got {limit}, {max_children}")
        normalise(&self.automaton.a, &self.match)
        if self.match.state == ROOT:
            limit = 0
        ints_out, counts_out = np.empty((3, limit), np.int32), np.empty((2, limit), np.int64)
        cdef int32_t[:, ::1] ints = ints_out
        cdef int64_t[:, ::1] counts = counts_out
        room = (limit + 1) * (max_children + 1)
        f.offers = <Continuation*>resized(NULL, room * (sizeof(Continuation) + sizeof(Entry)))
        f.heap = <Entry*>(f.offers + room)
        f.offered, f.waiting, f.max_children, f.min_prob = 0, 0, max_children, min_prob
        n = best_first(&self.automaton.a, self.match, &f, limit, ints, counts) if limit else 0
        free(f.offers)
        token_ids, parents, contexts = ints_out[:, :n]
        return (token_ids, parents, *counts_out[:, :n], contexts)
