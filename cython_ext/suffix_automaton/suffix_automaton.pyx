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
from common.types cimport int32_t, int64_t, state_t, token_t, uint32_t, uint64_t

include "suffix_automaton/automaton.pxi"
include "suffix_automaton/drafting.pxi"

cdef enum:
    GIL_FREE = 1024  # tokens from which giving up the GIL is worth a possible wait to get it back


cdef class SuffixAutomaton:
    """All substrings of a text that grows at its end.

    Time: O(1) amortised per token appended or matched, for any text. Memory per token: 12 bytes,
    20 per clone (at most one per token; about 0.4 on real text) and about 32 per branching transition
    (at most one per token). While an array grows, its old and new copies may coexist, so the peak is
    up to 2.25 times the array that grows; a capacity hint avoids that for the positions.

    Appending needs exclusive use. Cursors over a text that grows no more may run in any number of
    threads.
    After a MemoryError in `extend` the automaton must not be used any more.

    Args:
        capacity: tokens to reserve room for.

    Raises:
        ValueError: a negative capacity.
    """

    cdef Automaton a

    def __cinit__(self, int64_t capacity=0):
        memset(&self.a, 0, sizeof(Automaton))
        if capacity < 0:
            raise ValueError(f"capacity: expected at least 0, got {capacity}")
        allocate_slots(&self.a.root, 4)
        allocate_slots(&self.a.branches, 4)
        set_capacity(&self.a, max(capacity, <int64_t>FIRST_CAPACITY), 0)
        self.a.n = -1
        push_position(&self.a, SEPARATOR)

    def __dealloc__(self):
        free(self.a.positions)
        free(self.a.clones)
        free(self.a.root.slots)
        free(self.a.branches.slots)

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
            TypeError, ValueError: tokens that are not such ids; a cursor of another automaton.
                Nothing is appended then.
        """
        cdef Match* match = NULL
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
        """Append a separator, which matches nothing: no match or draft crosses it. O(1)."""
        make_room(&self.a)
        push_position(&self.a, SEPARATOR)

    @property
    def nbytes(self):
        """Bytes allocated."""
        cdef Automaton* a = &self.a
        return (
            (a.capacity + 2) * sizeof(Position)
            + a.clone_capacity * sizeof(Clone)
            + (a.root.capacity + a.branches.capacity) * sizeof(Slot)
        )

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

    def draft(self, int64_t limit):
        """The tokens after the first occurrence of the match, or of a shorter suffix of it.

        While fewer than `limit` tokens follow, shorter suffixes are looked at, which occur earlier;
        the longest with the most followers is taken.

        Args:
            limit: at most so many.

        Returns:
            int32 [0 .. limit], ending where the text or the document does.
        """
        cdef const Automaton* a = &self.automaton.a
        cdef int64_t end = 0, n, i
        normalise(a, &self.match)
        n = continuation(a, self.match, limit, &end)
        out = np.empty(n, dtype=np.int32)
        cdef int32_t[::1] view = out
        for i in range(n):
            view[i] = a.positions[end + 1 + i].token
        return out
