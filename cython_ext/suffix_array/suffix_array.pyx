"""Lookup in suffix arrays over token ids, and selection of the most frequent continuations.

A text is a sequence of ids, with -1 behind every document. A suffix array lists the positions of its
ids (not of the -1) in the order of the suffixes that start there. A match therefore is an interval of
ranks, its length the number of occurrences (Manber and Myers 1993). What follows a match is counted at
places that are spread evenly over its interval, as REST counts at the first 5,000.

Everything here may point into files that someone altered. Positions and ids are checked where they are
read: any contents give some answer, and never an id outside the vocabulary.
"""

import numpy as np

from common.blocks cimport owned
from common.heap cimport Entry, pop, push
from common.prefetch cimport prefetch
from common.sort cimport key_value, sort, sort_key
from common.types cimport int32_t, int64_t

cdef enum:
    END = -1          # stands behind every document
    SAMPLES = 1024    # occurrences of a match whose continuations are counted, at most
    DEPTH_BITS = 17

cdef struct Shard:
    const int32_t* tokens     # [length]
    const int32_t* suffixes   # [suffix_count], positions of ids, in the order of their suffixes
    int64_t length
    int64_t suffix_count
    int64_t vocab_size

cdef struct Interval:         # ranks [low, high) of one shard's suffixes
    int64_t low
    int64_t high

cdef struct Place:            # what stands behind one occurrence of a match
    const Shard* shard
    int64_t position

cdef struct Candidate:        # a continuation that may be taken into the tree
    int32_t token             # its last one
    int32_t parent            # the tree's node without it, -1 for the match
    int32_t depth
    int32_t first             # the samples that go on so: [first, last) of the order ...
    int32_t last
    int32_t parent_samples    # ... and how many go on as the parent does

cdef struct Tree:             # what was taken, in the arrays that the caller gets
    int32_t size
    int32_t capacity
    int32_t* token_ids
    int32_t* parents
    int32_t* contexts
    int64_t* counts
    int64_t* parent_counts


cdef inline int32_t token_at(const Shard* shard, int64_t position) noexcept nogil:
    """The id at a position; END outside the text, and for what is no id."""
    if not 0 <= position < shard.length:
        return END
    return shard.tokens[position] if 0 <= shard.tokens[position] < shard.vocab_size else END


cdef int64_t first_rank(const Shard* shard, Interval within, int32_t offset, int64_t token) noexcept nogil:
    """The first rank of an interval in whose suffix the id at an offset is at least `token`."""
    cdef int64_t middle
    while within.low < within.high:
        middle = (within.low + within.high) // 2
        if token_at(shard, <int64_t>shard.suffixes[middle] + offset) < token:
            within.low = middle + 1
        else:
            within.high = middle
    return within.low


cdef Interval narrowed(const Shard* shard, Interval within, int32_t offset, int64_t token) noexcept nogil:
    """The part of an interval in whose suffixes the id at an offset is `token`."""
    within.low = first_rank(shard, within, offset, token)
    within.high = first_rank(shard, within, offset, token + 1)
    return within


cdef int32_t find_node(const Tree* tree, int32_t parent, int32_t token) noexcept nogil:
    """A node of the tree; its size where there is none."""
    cdef int32_t node
    for node in range(parent + 1, tree.size):
        if tree.parents[node] == parent and tree.token_ids[node] == token:
            return node
    return tree.size


cdef class SuffixArray:
    """Suffix arrays of one or more shards, searched as if they were one. Immutable.

    Args:
        shards: per shard `(tokens, suffixes)`, int32 [length] and int32 [suffixes]. The buffers are
            kept, not copied, and may be read-only maps of files.
        vocab_size: ids at or above it are neither matched nor proposed.

    Raises:
        ValueError: no shard, an empty buffer, or a vocabulary size out of range.
    """

    cdef Shard* shards
    cdef readonly int32_t shard_count
    cdef readonly int64_t vocab_size
    cdef list buffers

    def __cinit__(self, list shards, int64_t vocab_size):
        cdef const int32_t[::1] tokens, suffixes
        cdef int32_t i
        if not 1 <= vocab_size < 1 << 31:
            raise ValueError(f"vocab_size: expected 1 to {(1 << 31) - 1}, got {vocab_size}")
        if not shards:
            raise ValueError("shards: expected at least one")
        self.vocab_size = vocab_size
        self.shard_count = <int32_t>len(shards)
        self.buffers = []
        self.shards = <Shard*>owned(self.buffers, len(shards) * sizeof(Shard))
        for i, (tokens, suffixes) in enumerate(shards):
            if tokens.shape[0] == 0 or suffixes.shape[0] == 0:
                raise ValueError("shards: expected at least one token and one suffix")
            self.buffers.append((tokens, suffixes))
            self.shards[i] = Shard(
                &tokens[0], &suffixes[0], tokens.shape[0], suffixes.shape[0], vocab_size
            )

    def count(self, token_ids) -> int:
        """Occurrences of a token string inside documents. O(len(token_ids) x log(tokens)).

        Raises:
            ValueError: `token_ids` is empty.
        """
        if not len(token_ids):
            raise ValueError("token_ids: expected at least one")
        cdef SuffixMatcher matcher = SuffixMatcher(self, len(token_ids))
        matcher.extend(token_ids)
        if matcher.match_length < len(token_ids):
            return 0
        return matcher.occurrences(matcher.match_length)


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
    cdef Interval* matches        # [max_match, shards], row l-1: the matches of length l
    cdef Place* samples           # [SAMPLES]
    cdef int64_t* order           # [SAMPLES], keys of samples: their token at some depth, their number
    cdef Candidate* candidates    # [SAMPLES + max_nodes]: those that wait share no sample
    cdef Entry* frontier          # [as many], heap of those that wait
    cdef int32_t candidate_count
    cdef int32_t frontier_size
    cdef list blocks

    def __cinit__(self, SuffixArray index not None, int32_t max_match, int32_t max_nodes=1):
        if not 1 <= max_match <= 1 << 16:
            raise ValueError(f"max_match: expected 1 to {1 << 16}, got {max_match}")
        if not 1 <= max_nodes <= 1 << 16:
            raise ValueError(f"max_nodes: expected 1 to {1 << 16}, got {max_nodes}")
        self.index = index
        self.max_match = max_match
        self.max_nodes = max_nodes
        self.match_length = 0
        self.blocks = []
        cdef list blocks = self.blocks
        cdef size_t shards = index.shard_count, most = SAMPLES + max_nodes
        self.matches = <Interval*>owned(blocks, max_match * shards * sizeof(Interval))
        self.samples = <Place*>owned(blocks, SAMPLES * sizeof(Place))
        self.order = <int64_t*>owned(blocks, SAMPLES * sizeof(int64_t))
        self.candidates = <Candidate*>owned(blocks, most * sizeof(Candidate))
        self.frontier = <Entry*>owned(blocks, most * sizeof(Entry))

    def extend(self, token_ids):
        """Append tokens to the text. O(max_match x log(tokens)) per token.

        Args:
            token_ids: iterable of int; any that the vocabulary lacks match nothing.
        """
        cdef int64_t token
        for token in token_ids:
            self.advance(token)

    def select(self, int32_t budget, int32_t depth, int32_t sources=1):
        """The most frequent continuations of the longest match, as a token tree.

        Nodes are taken best-first by their number of occurrences; of equally frequent ones the
        shallower, then the one with the earlier parent, then the lower id. If the continuations of
        the longest match do not fill the budget, those of the longest shorter match that occurs more
        often go on, without what is in the tree already. Occurrences of a match are counted at 1,024
        places at most.

        Args:
            budget: the most nodes, at most max_nodes.
            depth: the most tokens below the root.
            sources: how many match lengths may contribute.

        Returns:
            (token_ids, parents, counts, parent_counts, contexts): int32, int32, int64, int64, int32
            [nodes]. `counts` are occurrences of the match with the path to the node,
            `parent_counts` those without its last token, both in proportion to what was counted;
            `contexts` are the tokens of the latter.

        Raises:
            ValueError: `budget` exceeds max_nodes.
        """
        if budget > self.max_nodes:
            raise ValueError(f"budget: expected at most {self.max_nodes}, got {budget}")
        cdef int32_t capacity = max(budget, 0), length = self.match_length
        cdef int32_t[:, ::1] ids = np.empty((3, capacity + 1), np.int32)
        cdef int64_t[:, ::1] counts = np.empty((2, capacity + 1), np.int64)
        cdef Tree tree = Tree(0, capacity, &ids[0, 0], &ids[1, 0], &ids[2, 0], &counts[0, 0], &counts[1, 0])
        cdef int64_t count = 0
        with nogil:
            while length > 0 and sources > 0 and depth > 0 and tree.size < tree.capacity:
                if self.occurrences(length) > count:
                    count = self.occurrences(length)
                    self.grow(&tree, length, depth)
                    sources -= 1
                length -= 1
        token_ids, parents, contexts = np.asarray(ids)[:, : tree.size]
        return (token_ids, parents, *np.asarray(counts)[:, : tree.size], contexts)

    cdef Interval* row(self, int32_t length) noexcept nogil:
        return self.matches + (length - 1) * self.index.shard_count

    cdef int64_t occurrences(self, int32_t length) noexcept nogil:
        cdef const Interval* row = self.row(length)
        cdef int64_t count = 0
        cdef int32_t s
        for s in range(self.index.shard_count):
            count += row[s].high - row[s].low
        return count

    cdef void advance(self, int64_t token) noexcept nogil:
        cdef int32_t length = min(self.match_length + 1, self.max_match), s
        cdef const Shard* shard
        cdef Interval within
        self.match_length = 0
        if not 0 <= token < self.index.vocab_size:
            return
        while length > 0:  # downwards, since a length is narrowed from the one below
            for s in range(self.index.shard_count):
                shard = &self.index.shards[s]
                within = Interval(0, shard.suffix_count) if length == 1 else self.row(length - 1)[s]
                self.row(length)[s] = narrowed(shard, within, length - 1, token)
            if self.match_length == 0 and self.occurrences(length) > 0:
                self.match_length = length
            length -= 1

    cdef void grow(self, Tree* tree, int32_t length, int32_t depth) noexcept nogil:
        """Add the most frequent continuations of a match to a tree."""
        cdef int64_t occurrences = self.occurrences(length)
        cdef int32_t samples = self.sample(length, occurrences), node
        cdef Candidate taken
        self.candidate_count = self.frontier_size = 0
        self.split(0, samples, 0, -1)
        while self.frontier_size > 0 and tree.size < tree.capacity:
            taken = self.candidates[pop(self.frontier, &self.frontier_size).index]
            node = find_node(tree, taken.parent, taken.token)
            if node == tree.size:  # rather than taken already, with a longer match
                tree.token_ids[node] = taken.token
                tree.parents[node] = taken.parent
                tree.contexts[node] = length + taken.depth - 1
                tree.counts[node] = (taken.last - taken.first) * occurrences // samples
                tree.parent_counts[node] = taken.parent_samples * occurrences // samples
                tree.size += 1
            if taken.depth < depth:
                self.split(taken.first, taken.last, taken.depth, node)

    cdef int32_t sample(self, int32_t length, int64_t occurrences) noexcept nogil:
        """Spread samples evenly over the occurrences of a match; returns how many."""
        cdef const Interval* row = self.row(length)
        cdef int32_t count = <int32_t>min(occurrences, SAMPLES), s = 0, i
        cdef const Shard* shard
        cdef int64_t rank, position, before = 0  # ranks in front of the shard's
        for i in range(count):
            rank = (2 * i + 1) * occurrences // (2 * count)
            while rank - before >= row[s].high - row[s].low:
                before += row[s].high - row[s].low
                s += 1
            shard = &self.index.shards[s]
            position = <int64_t>shard.suffixes[row[s].low + rank - before] + length
            if 0 <= position < shard.length:
                prefetch(shard.tokens + position)
            self.samples[i] = Place(shard, position)
            self.order[i] = i
        return count

    cdef void split(self, int32_t first, int32_t last, int32_t depth, int32_t parent) noexcept nogil:
        """Make candidates of the tokens that follow a continuation at its samples."""
        cdef int32_t i, token, start, samples = last - first
        cdef const Place* place
        for i in range(first, last):
            place = &self.samples[key_value(self.order[i])]
            token = token_at(place.shard, place.position + depth)
            self.order[i] = sort_key(token, key_value(self.order[i]))
        sort(self.order + first, samples)
        while first < last:
            start, token = first, <int32_t>(self.order[first] >> 32)
            while first < last and self.order[first] >> 32 == token:
                first += 1
            if token == END:
                continue
            self.candidates[self.candidate_count] = Candidate(
                token, parent, depth + 1, start, first, samples
            )
            push(self.frontier, &self.frontier_size, Entry(
                (<int64_t>(first - start) << DEPTH_BITS) - depth,
                <int64_t>(parent + 1) << 32 | token,
                self.candidate_count,
            ))
            self.candidate_count += 1
