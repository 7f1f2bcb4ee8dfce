"""Suffix automaton of a growing text, in flat arrays.

Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985), built online.
The first transition of every state follows its earliest occurrence in the text, so its token is
never stored; only the root's transitions and those beyond a state's first stand in hash tables.
There are fewer of the latter than tokens.
"""

import numpy as np

from libc.stdlib cimport calloc, free, malloc, qsort, realloc
from libc.string cimport memset

from common.heap cimport Entry, pop, push
from common.types cimport int32_t, int64_t, state_t, token_t
from suffix_automaton.automaton cimport (
    FIRST_CAPACITY, MAX_POSITIONS, MISSING, ROOT, SEPARATOR, Automaton, Branch, Candidate, Clone,
    Frontier, Match, Position, branch_cell, count_of, earliest_end, first_target, first_token,
    latest_cell, latest_end, length_of, link_cell, link_of, step,
)
from suffix_automaton.transition_table cimport NO_TOKEN, Slot, Table, find

include "suffix_automaton/construction.pxi"
include "suffix_automaton/matching.pxi"
include "suffix_automaton/counts.pxi"
include "suffix_automaton/branching.pxi"

cdef enum:
    GIL_FREE = 1024  # tokens from which giving up the GIL is worth a possible wait to get it back


def _as_tokens(tokens):
    """int32 [n], whatever sequence or array of integers came."""
    if type(tokens) is np.ndarray and tokens.dtype == np.int32 and tokens.ndim == 1:
        return np.ascontiguousarray(tokens)
    array = np.asarray(tokens)
    if array.ndim != 1:
        raise ValueError(f"tokens: expected one dimension, got {array.ndim}")
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.dtype.kind not in "iu":
        raise TypeError(f"tokens: expected integers, got {array.dtype}")
    if array.min() < 0 or array.max() > 2147483647:
        raise ValueError(f"tokens: expected ids of 0 to 2**31 - 1, got {array.min()} to {array.max()}")
    return np.ascontiguousarray(array, dtype=np.int32)


cdef int _refuse_negative(const token_t[::1] tokens) except -1:
    cdef Py_ssize_t i
    for i in range(tokens.shape[0]):
        if tokens[i] < 0:
            raise ValueError(f"tokens: expected ids of 0 to 2**31 - 1, got {tokens[i]}")
    return 0


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
        reserve_positions(&self.a, max(capacity, <int64_t>FIRST_CAPACITY))
        self.a.refresh = refresh
        self.a.n = -1
        push_position(&self.a, SEPARATOR)
        self._frozen = False

    def __dealloc__(self):
        free(self.a.positions)
        free(self.a.clones)
        free(self.a.root.slots)
        free(self.a.branches.slots)
        release_counts(&self.a)

    def __len__(self):
        """Tokens and separators."""
        return self.a.n

    cdef int _append_all(self, const token_t[::1] tokens, Match* match) except -1 nogil:
        cdef Py_ssize_t i
        for i in range(tokens.shape[0]):
            if match != NULL:
                advance(&self.a, match, tokens[i])
            append(&self.a, tokens[i])
        return 0

    def extend(self, tokens, Cursor cursor=None):
        """Append tokens to the text.

        Args:
            tokens: int [n], ids of 0 to 2³¹ − 1; an int32 array is not copied.
            cursor: advanced over each token just before that is appended, so that it ends at the
                longest suffix of the text that occurred earlier. The other order would match the
                text with itself.

        Raises:
            TypeError, ValueError: tokens that are not such ids; a cursor of another automaton; the
                automaton is frozen. Nothing is appended then.
        """
        cdef const token_t[::1] ids = _as_tokens(tokens)
        cdef Match* match = NULL
        self._require_growing()
        _refuse_negative(ids)
        if cursor is not None:
            if cursor.automaton is not self:
                raise ValueError("cursor: expected one over this automaton, got one over another")
            match = &cursor.match
        if ids.shape[0] < GIL_FREE:
            self._append_all(ids, match)
        else:
            with nogil:
                self._append_all(ids, match)

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

        Needed by `Cursor.count` and `Cursor.draft_tree`; makes `Cursor.latest` exact.
        """
        if self._frozen:
            return
        with nogil:
            count_occurrences(&self.a)
            sort_all_branches(&self.a)
            self._shrink()
        self._frozen = True

    cdef int _shrink(self) except -1 nogil:
        cdef Automaton* a = &self.a
        a.position_capacity = 0
        reserve_positions(a, a.n)
        if a.clone_count:
            a.clone_capacity = 0
            reserve_clones(a, a.clone_count)
        return 0

    @property
    def nbytes(self):
        """Bytes allocated."""
        cdef Automaton* a = &self.a
        cdef int64_t counts = 0
        if a.position_counts != NULL:
            counts = (a.n + a.clone_count + 2) * sizeof(int32_t)
        return (
            a.position_capacity * sizeof(Position)
            + a.clone_capacity * sizeof(Clone)
            + (a.root.capacity + a.branches.capacity) * sizeof(Slot)
            + counts
        )

    @property
    def state_count(self):
        """States, the root included; separators count as states of their own."""
        return self.a.n + 1 + self.a.clone_count

    @property
    def operations(self):
        """Links followed and transitions written while building, for tests of linear time."""
        return self.a.operations

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

    def check_invariants(self):
        """Raise AssertionError where the arrays do not form the automaton of the text. O(n)."""
        cdef Automaton* a = &self.a
        cdef int64_t i, chained = 0
        assert a.position_capacity >= a.n + 2 and a.clone_capacity >= a.clone_count, "capacities"
        assert a.positions[a.n + 1].token == SEPARATOR, "sentinel"
        assert a.positions[ROOT].link == ROOT, "link of the root"
        assert a.clone_count <= a.n, "more clones than tokens"
        for i in range(1, a.n + 1):
            chained += self._check_state(<state_t>i)
        for i in range(a.clone_count):
            chained += self._check_state(~<state_t>i)
        assert chained == a.branches.used, "a transition that no state lists"
        assert self._check_transitions(ROOT) == a.root.used, "a root transition not listed"
        self._check_table(&a.root)
        self._check_table(&a.branches)

    cdef int64_t _check_state(self, state_t s) except -1:
        cdef Automaton* a = &self.a
        cdef state_t link = link_of(a, s)
        cdef int32_t end = earliest_end(a, s)
        assert -a.clone_count <= link <= a.n, "link out of range"
        assert length_of(a, link) < length_of(a, s) <= end <= a.n, "length"
        assert earliest_end(a, link) <= end <= latest_end(a, s) <= a.n, "end positions"
        assert link == ROOT or a.positions[earliest_end(a, link)].token == a.positions[end].token, (
            "a link that is no suffix"
        )
        assert a.positions[latest_end(a, s)].token == a.positions[end].token, "latest end"
        if first_token(a, s) != SEPARATOR:
            self._check_target(s, first_token(a, s), first_target(a, s))
        return self._check_transitions(s)

    cdef int64_t _check_transitions(self, state_t s) except -1:
        """Checks the chained transitions of a state and returns their number."""
        cdef Automaton* a = &self.a
        cdef const Table* table = &a.root if s == ROOT else &a.branches
        cdef token_t token = branch_cell(a, s)[0]
        cdef Slot slot
        cdef int64_t n = 0
        while token != NO_TOKEN:
            slot = find(table, s, token)[0]
            assert slot.token == token and slot.state == s, "a listed transition is missing"
            assert s == ROOT or token != first_token(a, s), "the first transition stored again"
            self._check_target(s, token, slot.target)
            token = slot.next_branch
            n += 1
            assert n <= table.used, "a cycle of transitions"
        return n

    cdef int _check_target(self, state_t s, token_t token, state_t target) except -1:
        cdef Automaton* a = &self.a
        assert -a.clone_count <= target <= a.n and target != ROOT, "target out of range"
        assert a.positions[earliest_end(a, target)].token == token, "target by another token"
        assert length_of(a, s) < length_of(a, target), "target not longer"
        assert length_of(a, s) >= length_of(a, link_of(a, target)), "target of a shorter string"
        return 0

    cdef int _check_table(self, const Table* t) except -1:
        cdef int64_t i, used = 0
        for i in range(t.capacity):
            used += t.slots[i].token != NO_TOKEN
        assert used == t.used and 4 * used <= 3 * t.capacity, "table load"
        return 0


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

    def advance_all(self, tokens):
        """Match tokens (int [n]) one after the other. Returns the new length."""
        cdef const token_t[::1] ids = _as_tokens(tokens)
        cdef Py_ssize_t i
        _refuse_negative(ids)
        for i in range(ids.shape[0]):
            advance(&self.automaton.a, &self.match, ids[i])
        return self.match.length

    def retreat(self):
        """Shorten the match to its longest suffix with more occurrences. Returns the new length."""
        normalise(&self.automaton.a, &self.match)
        self.match.state = link_of(&self.automaton.a, self.match.state)
        self.match.length = length_of(&self.automaton.a, self.match.state)
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
        return latest_end(&self.automaton.a, self.match.state)

    @property
    def count(self):
        """Occurrences of the match in the frozen text.

        Raises:
            ValueError: the automaton is not frozen.
        """
        self._require_frozen()
        normalise(&self.automaton.a, &self.match)
        return count_of(&self.automaton.a, self.match.state)

    cdef _require_frozen(self):
        if not self.automaton._frozen:
            raise ValueError("expected a frozen automaton, got a growing one")

    def draft(self, int64_t limit, bint latest=False, bint retreat=True):
        """The tokens after an occurrence of the match.

        Args:
            limit: at most so many.
            latest: take the late occurrence instead of the earliest.
            retreat: while fewer than `limit` tokens follow, look at shorter suffixes of the match,
                which occur earlier; the first with the most followers is taken.

        Returns:
            int32 [0 .. limit], ending where the text or the document does.
        """
        cdef const Automaton* a = &self.automaton.a
        cdef int64_t end = 0, n, i
        normalise(a, &self.match)
        n = continuation(a, self.match, limit, latest, retreat, &end)
        out = np.empty(n, dtype=np.int32)
        cdef int32_t[::1] view = out
        for i in range(n):
            view[i] = a.positions[end + 1 + i].token
        return out

    def draft_tree(self, int64_t limit, int64_t max_children=8, double min_prob=0.0):
        """The most frequent continuations of the match as a tree, best first.

        The `samd_sam_only` tree of SAM-Decoding: a node's rate is the share of its parent's
        occurrences that go on with it, and the path products of the rates order the nodes.

        Args:
            limit: at most so many nodes.
            max_children: the most children of a node, the most frequent ones.
            min_prob: nodes whose product is less are left out.

        Returns:
            token_ids int32 [n], parents int32 [n] (−1: the root), rates float32 [n], counts
            int32 [n] (the node's occurrences).

        Raises:
            ValueError: the automaton is not frozen; limit or max_children is below 0.
        """
        cdef Frontier f
        cdef int64_t room
        self._require_frozen()
        if limit < 0 or max_children < 0:
            raise ValueError(f"limit, max_children: expected at least 0, got {limit}, {max_children}")
        normalise(&self.automaton.a, &self.match)
        if self.match.state == ROOT:
            limit = 0
        tokens, parents = np.empty(limit, np.int32), np.empty(limit, np.int32)
        rates, counts = np.empty(limit, np.float32), np.empty(limit, np.int32)
        cdef int32_t[::1] tokens_view = tokens, parents_view = parents, counts_view = counts
        cdef float[::1] rates_view = rates
        if limit == 0:
            return tokens, parents, rates, counts
        room = (limit + 1) * (max_children + 1)
        f.candidates = <Candidate*>malloc(room * sizeof(Candidate))
        f.heap = <Entry*>malloc(room * sizeof(Entry))
        if f.candidates == NULL or f.heap == NULL:
            free(f.candidates)
            free(f.heap)
            raise MemoryError(f"no memory for a draft of {limit} nodes")
        f.offered, f.waiting, f.max_children, f.min_prob = 0, 0, max_children, min_prob
        n = best_first(
            &self.automaton.a, self.match.state, &f, limit,
            &tokens_view[0], &parents_view[0], &rates_view[0], &counts_view[0],
        )
        free(f.candidates)
        free(f.heap)
        return tokens[:n], parents[:n], rates[:n], counts[:n]
