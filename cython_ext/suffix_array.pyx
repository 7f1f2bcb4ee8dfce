"""Lookup in suffix arrays over token ids, and selection of the most frequent continuations.

A text is a sequence of codes: token id + 1, and 0 after every document, stored big-endian in `width`
bytes so that the order of its byte strings is the order of its code strings. A suffix array lists
the positions of its ids (not of the zeros) in the order of the suffixes that start there. A match
therefore is an interval of ranks, its length the number of occurrences (Manber and Myers 1993).

Everything here may point into files that someone altered. Ranks, positions and codes are checked
where they are read: any bytes give some answer, and never an id outside the vocabulary.
"""

from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.string cimport memcpy

import numpy as np

from codes cimport Text, code_at
from types cimport int32_t, int64_t, uint8_t, uint32_t

cdef struct Shard:
    Text text
    const uint32_t* suffixes  # [suffix_count], positions of codes, in the order of their suffixes
    const uint32_t* starts    # [bucket_count + 1], first rank of every bucket of first codes
    int64_t suffix_count
    int64_t bucket_count
    int32_t bucket_shift


cdef struct Interval:         # ranks [low, high) of one shard's suffixes
    int64_t low
    int64_t high


cdef struct Entry:            # an element of the selection's heap
    int64_t count             # occurrences; of a range, all its suffixes
    int64_t parent_count
    uint32_t code             # 0: a range of next codes still to be told apart
    int32_t parent            # node of the tree, -1 for the root
    int32_t depth             # tokens after the match, the entry's own included
    int32_t slot              # row of the interval pool


# ---------------------------------------------------------------------------------- searching

cdef inline uint32_t suffix_code(const Shard* shard, int64_t rank, int32_t offset) noexcept nogil:
    """The code `offset` places into the suffix of a rank; 0 for a rank that does not exist."""
    if not 0 <= rank < shard.suffix_count:
        return 0
    return code_at(&shard.text, <int64_t>shard.suffixes[rank] + offset)


cdef int64_t first_at_least(
    const Shard* shard, int64_t low, int64_t high, int32_t offset, uint32_t code
) noexcept nogil:
    """The first rank in [low, high) whose suffix has a code >= `code` at `offset`, or `high`."""
    cdef int64_t middle
    while low < high:
        middle = low + (high - low) // 2
        if suffix_code(shard, middle, offset) < code:
            low = middle + 1
        else:
            high = middle
    return low


cdef int64_t run_end(
    const Shard* shard, int64_t low, int64_t high, int32_t offset, uint32_t code
) noexcept nogil:
    """End of the run of `code` that starts at rank `low`: gallops, since most runs are short."""
    cdef int64_t step = 1
    if low < high and suffix_code(shard, high - 1, offset) == code:
        return high
    while low + step < high and suffix_code(shard, low + step, offset) <= code:
        low += step
        step *= 2
    return first_at_least(shard, low, min(low + step, high), offset, code + 1)


cdef int64_t run_start(
    const Shard* shard, int64_t low, int64_t high, int32_t offset, uint32_t code
) noexcept nogil:
    """Start of the run of `code` that holds rank `high` - 1, galloping downwards."""
    cdef int64_t step = 1
    if suffix_code(shard, low, offset) == code:
        return low
    while high - step > low and suffix_code(shard, high - step, offset) >= code:
        high -= step
        step *= 2
    return first_at_least(shard, max(low, high - step), high, offset, code)


cdef Interval narrow(
    const Shard* shard, Interval within, int32_t offset, uint32_t code
) noexcept nogil:
    """The suffixes of an interval that have `code` at `offset`."""
    cdef Interval out
    out.low = first_at_least(shard, within.low, within.high, offset, code)
    out.high = run_end(shard, out.low, within.high, offset, code)
    return out


cdef Interval bucket_of(const Shard* shard, uint32_t code) noexcept nogil:
    """The suffixes that start with `code`, found by way of the bucket table."""
    cdef int64_t bucket = code >> shard.bucket_shift
    cdef Interval out
    if bucket >= shard.bucket_count:
        out.low = out.high = 0
        return out
    out.low = min(<int64_t>shard.starts[bucket], shard.suffix_count)
    out.high = max(out.low, min(<int64_t>shard.starts[bucket + 1], shard.suffix_count))
    return narrow(shard, out, 0, code)


cdef class SuffixArray:
    """Suffix arrays of one or more shards, searched as if they were one. Immutable.

    Args:
        shards: per shard `(codes, suffixes, starts, bucket_shift)`: uint8 [length x width], uint32
            [suffixes], uint32 [buckets + 1] and the shift of :func:`bucket_starts`. The buffers are
            kept, not copied, and may be read-only maps of files.
        width: bytes per code, 1 to 4.
        vocab_size: ids at or above it are neither matched nor proposed.

    Raises:
        ValueError: no shard, an empty buffer, a length that is no multiple of `width`, or a width,
            shift or vocabulary size out of range.
    """

    cdef Shard* shards
    cdef readonly int32_t shard_count
    cdef readonly int64_t vocab_size
    cdef list buffers

    def __cinit__(self, list shards, int32_t width, int64_t vocab_size):
        cdef const uint8_t[::1] codes
        cdef const uint32_t[::1] suffixes, starts
        cdef int32_t shift, i
        if not 1 <= width <= 4:
            raise ValueError(f"width: expected 1 to 4 bytes, got {width}")
        if not 1 <= vocab_size < 1 << 31:
            raise ValueError(f"vocab_size: expected 1 to {(1 << 31) - 1}, got {vocab_size}")
        if not shards:
            raise ValueError("shards: expected at least one")
        self.vocab_size = vocab_size
        self.shard_count = <int32_t>len(shards)
        self.buffers = []
        self.shards = <Shard*>PyMem_Malloc(len(shards) * sizeof(Shard))
        if not self.shards:
            raise MemoryError()
        for i, (codes, suffixes, starts, shift) in enumerate(shards):
            if not 0 <= shift <= 30:
                raise ValueError(f"bucket_shift: expected 0 to 30, got {shift}")
            if codes.shape[0] == 0 or codes.shape[0] % width:
                raise ValueError(f"codes: expected a multiple of {width} bytes, got {codes.shape[0]}")
            if suffixes.shape[0] == 0 or starts.shape[0] < 2:
                raise ValueError("suffixes and starts: expected at least one suffix and one bucket")
            self.buffers.append((codes, suffixes, starts))
            self.shards[i] = Shard(
                Text(&codes[0], codes.shape[0] // width, width), &suffixes[0], &starts[0],
                suffixes.shape[0], starts.shape[0] - 1, shift,
            )

    def __dealloc__(self):
        PyMem_Free(self.shards)

    def count(self, token_ids) -> int:
        """Occurrences of a token string inside documents. O(len(token_ids) x log(tokens)).

        Raises:
            ValueError: `token_ids` is empty.
        """
        cdef SuffixMatcher matcher = SuffixMatcher(self, max(len(token_ids), 1))
        if not len(token_ids):
            raise ValueError("token_ids: expected at least one")
        matcher.extend(token_ids)
        if matcher.match_length < len(token_ids):
            return 0
        return matcher.occurrences(matcher.match_length)


# ---------------------------------------------------------------------------------- evidence

cdef inline int32_t bucket(double value, const double[::1] edges) noexcept nogil:
    """How many of the ascending edges are at or below the value."""
    cdef int32_t i = 0
    while i < edges.shape[0] and value >= edges[i]:
        i += 1
    return i


def evidence_classes(
    const int64_t[::1] counts,
    const int64_t[::1] parent_counts,
    const int32_t[::1] contexts,
    const double[::1] context_edges,
    const double[::1] share_edges,
    const double[::1] count_edges,
):
    """The class of evidence behind each node of a selection.

    Nodes are told apart by context length, by their share of their parent's occurrences and by how
    many those are, each bucketed at its ascending edges; the class is the bucket's index in row-major
    order. Returns int32 [nodes].
    """
    cdef Py_ssize_t i
    cdef int32_t row
    cdef int32_t[::1] classes = np.empty(counts.shape[0], np.int32)
    with nogil:
        for i in range(counts.shape[0]):
            row = bucket(contexts[i], context_edges) * <int32_t>(share_edges.shape[0] + 1)
            row += bucket(<double>counts[i] / <double>parent_counts[i], share_edges)
            row *= <int32_t>(count_edges.shape[0] + 1)
            classes[i] = row + bucket(<double>parent_counts[i], count_edges)
    return np.asarray(classes)


# ---------------------------------------------------------------------------------- matching

cdef inline bint before(const Entry* a, const Entry* b) noexcept nogil:
    """Whether `a` leaves the heap first: by count; a range, which may hide as frequent a code, before
    a code; then the shallower, the one with the earlier parent, the lower code."""
    if a.count != b.count:
        return a.count > b.count
    if (a.code == 0) != (b.code == 0):
        return a.code == 0
    if a.depth != b.depth:
        return a.depth < b.depth
    if a.parent != b.parent:
        return a.parent < b.parent
    return a.code < b.code


cdef inline int64_t total(const Interval* intervals, int32_t shard_count) noexcept nogil:
    """Suffixes in one row of intervals."""
    cdef int64_t count = 0
    cdef int32_t s
    for s in range(shard_count):
        count += intervals[s].high - intervals[s].low
    return count


cdef class Tree:
    """The nodes that a selection has taken, in the arrays that it returns."""

    cdef int32_t size
    cdef int32_t capacity
    cdef int32_t[::1] token_ids
    cdef int32_t[::1] parents
    cdef int32_t[::1] contexts
    cdef int64_t[::1] counts
    cdef int64_t[::1] parent_counts

    def __cinit__(self, int32_t capacity):
        self.capacity = capacity
        self.token_ids = np.empty(capacity, np.int32)
        self.parents = np.empty(capacity, np.int32)
        self.contexts = np.empty(capacity, np.int32)
        self.counts = np.empty(capacity, np.int64)
        self.parent_counts = np.empty(capacity, np.int64)

    def arrays(self):
        fields = [self.token_ids, self.parents, self.counts, self.parent_counts, self.contexts]
        return tuple([np.asarray(field)[: self.size] for field in fields])

    cdef int32_t add(self, const Entry* entry, int32_t length) noexcept nogil:
        """The node of an entry, new unless a longer match brought it."""
        cdef int32_t token = <int32_t>(entry.code - 1), node
        for node in range(entry.parent + 1, self.size):
            if self.parents[node] == entry.parent and self.token_ids[node] == token:
                return node
        node = self.size
        self.token_ids[node] = token
        self.parents[node] = entry.parent
        self.contexts[node] = length + entry.depth - 1
        self.counts[node] = entry.count
        self.parent_counts[node] = entry.parent_count
        self.size = node + 1
        return node


cdef class SuffixMatcher:
    """The suffixes of a growing text that occur in a :class:`SuffixArray`, with all their places.

    For every length up to `max_match` at which the end of the text occurs somewhere, the interval
    of its occurrences is kept; a new token narrows each by binary search. One thread at a time.

    Args:
        index: what is searched; shared by any number of matchers and threads.
        max_match: the longest suffix that is looked up, at least 1.
        max_nodes: the most nodes that :meth:`select` may be asked for, at least 1.

    Attributes:
        match_length: tokens of the longest suffix that occurs, at most `max_match`.
    """

    cdef readonly SuffixArray index
    cdef readonly int32_t max_match
    cdef readonly int32_t max_nodes
    cdef readonly int32_t match_length
    cdef Interval* matches  # [max_match, shard_count], row l-1: the matches of length l
    cdef Interval* pool     # [2 * max_splits + 1, shard_count]
    cdef Entry* heap        # [2 * max_splits + 1]
    cdef int32_t max_splits
    cdef int32_t splits_left
    cdef int32_t pool_used
    cdef int32_t heap_size

    def __cinit__(self, SuffixArray index not None, int32_t max_match, int32_t max_nodes=1):
        if not 1 <= max_match <= 1 << 16:
            raise ValueError(f"max_match: expected 1 to {1 << 16}, got {max_match}")
        if not 1 <= max_nodes <= 1 << 16:
            raise ValueError(f"max_nodes: expected 1 to {1 << 16}, got {max_nodes}")
        cdef size_t row = index.shard_count * sizeof(Interval)
        self.index = index
        self.max_match = max_match
        self.max_nodes = max_nodes
        self.match_length = 0
        # Work on flat distributions, whose many rare codes no draft needs, is bounded.
        self.max_splits = 3 * max_nodes // 2 + 16
        cdef size_t entries = 2 * self.max_splits + 1  # a split leaves two more than it found
        self.matches = <Interval*>PyMem_Malloc(max_match * row)
        self.pool = <Interval*>PyMem_Malloc(entries * row)
        self.heap = <Entry*>PyMem_Malloc(entries * sizeof(Entry))
        if not self.matches or not self.pool or not self.heap:
            raise MemoryError()

    def __dealloc__(self):
        PyMem_Free(self.matches)
        PyMem_Free(self.pool)
        PyMem_Free(self.heap)

    def extend(self, token_ids):
        """Append tokens to the text. O(max_match x log(tokens)) per token.

        Args:
            token_ids: iterable of int; any that the vocabulary lacks match nothing.
        """
        cdef int64_t token
        for token in token_ids:
            self.advance(token)

    def counts(self) -> list[int]:
        """Occurrences of the text's last 1, 2, ... `match_length` tokens."""
        return [self.occurrences(length) for length in range(1, self.match_length + 1)]

    def select(self, int32_t budget, int32_t depth, int32_t sources=1):
        """The most frequent continuations of the longest match, as a token tree.

        Nodes are taken best-first by their exact number of occurrences; of equally frequent ones the
        shallower, then the one with the earlier parent, then the lower id. If the continuations of
        the longest match do not fill the budget, those of the longest shorter match that occurs more
        often go on, without what is in the tree already. A distribution so flat that its most
        frequent tokens are not found in 1.5 x max_nodes + 16 splits is given up where it stands.

        Args:
            budget: the most nodes, at most max_nodes.
            depth: the most tokens below the root.
            sources: how many match lengths may contribute.

        Returns:
            (token_ids, parents, counts, parent_counts, contexts): int32, int32, int64, int64, int32
            [nodes]. `counts` are occurrences of the match with the path to the node,
            `parent_counts` those without its last token, `contexts` the tokens of the latter.

        Raises:
            ValueError: `budget` exceeds max_nodes.
        """
        if budget > self.max_nodes:
            raise ValueError(f"budget: expected at most {self.max_nodes}, got {budget}")
        cdef Tree tree = Tree(max(budget, 0))
        cdef int32_t length = self.match_length
        cdef int64_t count = 0
        self.splits_left = self.max_splits
        with nogil:
            while length > 0 and sources > 0 and tree.size < tree.capacity:
                if self.occurrences(length) > count:
                    count = self.occurrences(length)
                    self.grow(tree, length, depth)
                    sources -= 1
                length -= 1
        return tree.arrays()

    def check_invariants(self) -> None:
        """Raise AssertionError unless every shorter match occurs at least as often as a longer one."""
        cdef int32_t length
        for length in range(1, self.match_length):
            assert self.occurrences(length) >= self.occurrences(length + 1) > 0, "counts"
        assert 0 <= self.match_length <= self.max_match, "match length"

    cdef int64_t occurrences(self, int32_t length) noexcept nogil:
        cdef int32_t shards = self.index.shard_count
        return total(self.matches + (length - 1) * shards, shards)

    cdef void advance(self, int64_t token) noexcept nogil:
        cdef int32_t shards = self.index.shard_count, length, s
        cdef Interval* row
        cdef Interval* shorter
        cdef uint32_t code
        length = min(self.match_length + 1, self.max_match)
        self.match_length = 0
        if not 0 <= token < self.index.vocab_size:
            return
        code = <uint32_t>(token + 1)
        while length > 0:  # downwards, since a length is narrowed from the one below
            row = self.matches + (length - 1) * shards
            shorter = row - shards
            for s in range(shards):
                if length == 1:
                    row[s] = bucket_of(&self.index.shards[s], code)
                else:
                    row[s] = narrow(&self.index.shards[s], shorter[s], length - 1, code)
            if self.match_length == 0 and total(row, shards) > 0:
                self.match_length = length
            length -= 1

    cdef void grow(self, Tree tree, int32_t length, int32_t depth) noexcept nogil:
        """Add the most frequent continuations of the match of one length to the tree."""
        cdef int32_t shards = self.index.shard_count, node
        cdef Entry entry
        memcpy(self.pool, self.matches + (length - 1) * shards, shards * sizeof(Interval))
        self.pool_used = 1
        self.heap_size = 0
        entry = Entry(self.occurrences(length), self.occurrences(length), 0, -1, 1, 0)
        if depth > 0:
            self.push(entry)
        while self.heap_size > 0 and tree.size < tree.capacity:
            entry = self.pop()
            if entry.code == 0:
                if self.splits_left > 0:
                    self.split(entry, length)
                continue
            node = tree.add(&entry, length)
            if entry.depth < depth:
                self.push(Entry(entry.count, entry.count, 0, node, entry.depth + 1, entry.slot))

    cdef void split(self, Entry entry, int32_t length) noexcept nogil:
        """Put back a range of next codes as one of its codes, what lies below and what above."""
        cdef int32_t shards = self.index.shard_count, offset = length + entry.depth - 1, s, widest = 0
        cdef Interval* row = self.pool + entry.slot * shards
        cdef Interval* below = self.pool + self.pool_used * shards
        cdef Interval* above = below + shards
        cdef Interval run
        cdef const Shard* shard
        cdef int64_t middle
        for s in range(shards):
            if row[s].high - row[s].low > row[widest].high - row[widest].low:
                widest = s
        shard = &self.index.shards[widest]
        middle = row[widest].low + (row[widest].high - row[widest].low) // 2
        cdef uint32_t code = suffix_code(shard, middle, offset)
        if code > self.index.vocab_size:  # only in an altered file
            return
        for s in range(shards):
            if s == widest:
                run.low = run_start(shard, row[s].low, middle + 1, offset, code)
                run.high = run_end(shard, middle, row[s].high, offset, code)
            else:
                run = narrow(&self.index.shards[s], row[s], offset, code)
            below[s] = Interval(row[s].low, run.low)
            above[s] = Interval(run.high, row[s].high)
            row[s] = run
        self.put_back(entry, 0, self.pool_used)
        self.put_back(entry, 0, self.pool_used + 1)
        self.pool_used = self.pool_used + 2
        self.splits_left = self.splits_left - 1
        if code > 0:  # nothing follows the end of a document
            self.put_back(entry, code, entry.slot)

    cdef void put_back(self, Entry entry, uint32_t code, int32_t slot) noexcept nogil:
        """Push one part of a split entry unless it is empty."""
        cdef int32_t shards = self.index.shard_count
        entry.count = total(self.pool + slot * shards, shards)
        entry.code = code
        entry.slot = slot
        if entry.count > 0:
            self.push(entry)

    cdef void push(self, Entry entry) noexcept nogil:
        cdef int32_t i = self.heap_size, up
        self.heap_size = i + 1
        while i > 0:
            up = (i - 1) // 2
            if not before(&entry, &self.heap[up]):
                break
            self.heap[i] = self.heap[up]
            i = up
        self.heap[i] = entry

    cdef Entry pop(self) noexcept nogil:
        cdef Entry top = self.heap[0], last
        cdef int32_t i = 0, child
        self.heap_size = self.heap_size - 1
        last = self.heap[self.heap_size]
        while 2 * i + 1 < self.heap_size:
            child = 2 * i + 1
            if child + 1 < self.heap_size and before(&self.heap[child + 1], &self.heap[child]):
                child += 1
            if not before(&self.heap[child], &last):
                break
            self.heap[i] = self.heap[child]
            i = child
        self.heap[i] = last
        return top
