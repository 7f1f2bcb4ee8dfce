"""Lookup in suffix arrays over token ids, and selection of the most frequent continuations.

A text is a sequence of codes: token id + 1, and 0 after every document, stored big-endian in `width`
bytes so that the order of its byte strings is the order of its code strings. A suffix array lists
the positions of its ids (not of the zeros) in the order of the suffixes that start there. A match
therefore is an interval of ranks, its length the number of occurrences (Manber and Myers 1993).

Everything here may point into files that someone altered. What is read is compared with checksums
first. Ranks, positions and codes are checked where they are read too: any bytes, with sums that fit,
give some answer, and never an id outside the vocabulary.
"""

import numpy as np

cimport cython
from libc.string cimport memcpy, memmove, memset

from common.blocks cimport owned
from common.heap cimport Entry, pop, push
from common.prefetch cimport prefetch
from common.types cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

include "suffix_array/soundness.pxi"
include "suffix_array/search.pxi"
include "suffix_array/selection.pxi"

BLOCK_ENTRIES = 1 << BLOCK_BITS
"""Entries of a file that share a checksum."""


def block_sums(const uint8_t[::1] data not None, int64_t entry_bytes):
    """The checksum of each block of a file whose entries take so many bytes: uint64 [blocks]."""
    cdef Blocks blocks = Blocks(NULL, data.shape[0], entry_bytes << BLOCK_BITS, NULL, NULL, NULL, examine)
    cdef uint64_t[::1] sums = np.empty(block_count(&blocks), np.uint64)
    cdef int64_t i
    if blocks.size:
        blocks.bytes = &data[0]
    with nogil:
        for i in range(sums.shape[0]):
            sums[i] = sum_of(&blocks, i)
    return np.asarray(sums)


def damage(file, block) -> ValueError:
    """What is raised where a block of a file is not as it was written."""
    expected = "expected the checksum that it was written with, got another"
    return ValueError(f"{file}: block {block} is damaged: {expected}")


cdef class SuffixArray:
    """Suffix arrays of one or more shards, searched as if they were one. Immutable.

    Args:
        shards: per shard `(codes, suffixes, starts, bucket_shift)`: uint8 [length x width], uint32
            [suffixes], uint32 [buckets + 1] and the shift of its buckets. The buffers are
            kept, not copied, and may be read-only maps of files.
        width: bytes per code, 1 to 4.
        vocab_size: ids at or above it are neither matched nor proposed.
        files: per shard `(name, sums)`: what its files are called, and uint64 sums of the blocks of
            codes, suffixes and starts, behind one another. Blocks are compared with them when they
            are first read. None: they are believed.

    Raises:
        ValueError: no shard, an empty buffer, a length that is no multiple of `width`, a width,
            shift or vocabulary size out of range, or too few sums. From any method here and of
            `SuffixMatcher`, once a block that was read, by whomever, is damaged.
    """

    cdef Shard* shards
    cdef uint8_t* damaged
    cdef list names
    cdef readonly int32_t shard_count
    cdef readonly int64_t vocab_size
    cdef list buffers

    def __cinit__(self, list shards, int32_t width, int64_t vocab_size, list files=None):
        cdef const uint8_t[::1] codes
        cdef const uint32_t[::1] suffixes, starts
        cdef const uint64_t[::1] sums
        cdef Blocks of_codes, of_suffixes, of_starts
        cdef int32_t shift, i
        cdef int64_t used
        if not 1 <= width <= 4:
            raise ValueError(f"width: expected 1 to 4 bytes, got {width}")
        if not 1 <= vocab_size < 1 << 31:
            raise ValueError(f"vocab_size: expected 1 to {(1 << 31) - 1}, got {vocab_size}")
        if not shards:
            raise ValueError("shards: expected at least one")
        self.vocab_size = vocab_size
        self.shard_count = <int32_t>len(shards)
        self.buffers = []
        self.names = []
        self.damaged = <uint8_t*>owned(self.buffers, 1)
        self.shards = <Shard*>owned(self.buffers, len(shards) * sizeof(Shard))
        for i, (codes, suffixes, starts, shift) in enumerate(shards):
            if not 0 <= shift <= 30:
                raise ValueError(f"bucket_shift: expected 0 to 30, got {shift}")
            if codes.shape[0] == 0 or codes.shape[0] % width:
                raise ValueError(f"codes: expected a multiple of {width} bytes, got {codes.shape[0]}")
            if suffixes.shape[0] == 0 or starts.shape[0] < 2:
                raise ValueError("suffixes and starts: expected at least one suffix and one bucket")
            self.buffers.append((codes, suffixes, starts))
            name, sums = ("", None) if files is None else files[i]
            used = 0
            self.names.append(name)
            self.buffers.append(sums)
            of_codes = self.blocks(&codes[0], codes.shape[0] // width, width, sums, &used)
            of_suffixes = self.blocks(<const uint8_t*>&suffixes[0], suffixes.shape[0], 4, sums, &used)
            of_starts = self.blocks(<const uint8_t*>&starts[0], starts.shape[0], 4, sums, &used)
            self.shards[i] = Shard(
                Text(&codes[0], codes.shape[0] // width, width, of_codes), &suffixes[0], &starts[0],
                suffixes.shape[0], starts.shape[0] - 1, shift, of_suffixes, of_starts,
            )

    cdef Blocks blocks(
        self, const uint8_t* data, int64_t entries, int64_t width, const uint64_t[::1] sums, int64_t* used
    ) except *:
        """Those of a file, whose sums follow the ones that are used."""
        cdef int64_t block_bytes = width << BLOCK_BITS
        cdef Blocks found = Blocks(data, entries * width, block_bytes, NULL, NULL, self.damaged, examine)
        cdef int64_t count = block_count(&found)
        found.states = <uint8_t*>owned(self.buffers, count)
        if sums is None:
            memset(found.states, SOUND, count)
        elif used[0] + count > sums.shape[0]:
            raise ValueError(f"sums: expected at least {used[0] + count}, got {sums.shape[0]}")
        else:
            found.sums = &sums[used[0]]
            used[0] += count
        return found

    cdef int require_sound(self) except -1:
        """ValueError where what was read may have been damaged."""
        cdef const Blocks* parts[3]
        cdef int64_t block
        cdef int32_t s
        if not load(self.damaged):
            return 0
        for s in range(self.shard_count):
            parts[0] = &self.shards[s].text.blocks
            parts[1], parts[2] = &self.shards[s].suffix_blocks, &self.shards[s].start_blocks
            for i, part in enumerate(("tokens", "suffixes", "starts")):
                for block in range(block_count(parts[i])):
                    if load(parts[i].states + block) == DAMAGED:
                        raise damage(f"{self.names[s]}.{part}", block)
        return 0

    def tokens(self, int32_t shard, int64_t start, int64_t stop):
        """The ids at some places among a shard's codes: uint32 [n]; of the ends of documents, the
        largest."""
        cdef const Text* text = &self.shards[shard].text
        cdef int64_t first = max(start, <int64_t>0), end = min(stop, text.length), i
        cdef uint32_t[::1] ids = np.empty(max(end - first, <int64_t>0), np.uint32)
        with nogil:
            for i in range(ids.shape[0]):
                ids[i] = <uint32_t>(<int64_t>code_at(text, first + i) - 1)
        self.require_sound()
        return np.asarray(ids)

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

    def find(self, token_ids, int64_t most) -> list:
        """Where a token string occurs: (shard, place among its codes), `most` of them at most.

        Raises:
            ValueError: `token_ids` is empty.
        """
        cdef SuffixMatcher matcher = SuffixMatcher(self, max(len(token_ids), 1))
        cdef const Shard* shard
        cdef Interval within
        cdef int64_t rank
        cdef int32_t s
        if not len(token_ids):
            raise ValueError("token_ids: expected at least one")
        matcher.extend(token_ids)
        found = []
        if matcher.match_length < len(token_ids):
            return found
        for s in range(self.shard_count):
            shard, within = &self.shards[s], matcher.row(matcher.match_length)[s]
            for rank in range(within.low, min(within.high, within.low + most - len(found))):
                if is_sound(&shard.suffix_blocks, rank):
                    found.append((s, min(<int64_t>shard.suffixes[rank], shard.text.length - 1)))
        self.require_sound()
        return found


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
    cdef Selection selection
    cdef int32_t max_codes
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
        self.max_codes = 4 * max_nodes + LANES
        self.blocks = []
        cdef list blocks = self.blocks
        cdef Selection* work = &self.selection
        cdef size_t shards = index.shard_count, codes = self.max_codes
        self.matches = <Interval*>owned(blocks, max_match * shards * sizeof(Interval))
        work.shards, work.shard_count, work.vocab_size = index.shards, index.shard_count, index.vocab_size
        work.range_limit = 4 * self.max_codes + 2 * LANES
        work.candidates = <Candidate*>owned(blocks, (codes + 1) * sizeof(Candidate))
        work.ranges = <Range*>owned(blocks, work.range_limit * sizeof(Range))
        work.frontier = <Entry*>owned(blocks, work.range_limit * sizeof(Entry))
        work.rows = <Interval*>owned(blocks, (3 * codes + 1) * shards * sizeof(Interval))
        work.best = <Entry*>owned(blocks, (max_nodes + 1) * sizeof(Entry))
        work.samples = <Sample*>owned(blocks, 2 * (LANES + shards) * sizeof(Sample))
        work.found = <uint32_t*>owned(blocks, (LANES + shards) * sizeof(uint32_t))
        work.most = <int64_t*>owned(blocks, (LANES + shards) * sizeof(int64_t))

    def extend(self, token_ids):
        """Append tokens to the text. O(max_match x log(tokens)) per token.

        Args:
            token_ids: iterable of int; any that the vocabulary lacks match nothing.
        """
        cdef int64_t token
        for token in token_ids:
            self.advance(token)
        self.require_sound()

    def select(self, int32_t budget, int32_t depth, int32_t sources=1):
        """The most frequent continuations of the longest match, as a token tree.

        Nodes are taken best-first by their exact number of occurrences; of equally frequent ones the
        shallower, then the one with the earlier parent, then the lower id. If the continuations of
        the longest match do not fill the budget, those of the longest shorter match that occurs more
        often go on, without what is in the tree already. Of distributions so flat that more
        than 2 x max_nodes tokens have to be told apart, less frequent ones may be missing.

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
        cdef int32_t capacity = max(budget, 0), length = self.match_length
        cdef int32_t[:, ::1] ids = np.empty((3, capacity + 1), np.int32)
        cdef int64_t[:, ::1] counts = np.empty((2, capacity + 1), np.int64)
        cdef Tree tree = Tree(0, capacity, &ids[0, 0], &ids[1, 0], &ids[2, 0], &counts[0, 0], &counts[1, 0])
        cdef int64_t count = 0
        self.selection.codes_left = self.max_codes
        # Work on flat distributions, whose many rare codes no draft needs, is bounded.
        self.selection.searches_left = 2 * self.max_nodes
        with nogil:
            while length > 0 and sources > 0 and tree.size < tree.capacity:
                if self.occurrences(length) > count:
                    count = self.occurrences(length)
                    grow(&self.selection, self.row(length), length, depth, &tree)
                    sources -= 1
                length -= 1
        self.require_sound()
        token_ids, parents, contexts = np.asarray(ids)[:, : tree.size]
        return (token_ids, parents, *np.asarray(counts)[:, : tree.size], contexts)

    cdef int require_sound(self) except -1:
        """ValueError where what was read may have been damaged; then nothing is matched any more."""
        if load(self.index.damaged):
            self.match_length = 0
        return self.index.require_sound()

    cdef Interval* row(self, int32_t length) noexcept nogil:
        return self.matches + (length - 1) * self.index.shard_count

    cdef int64_t occurrences(self, int32_t length) noexcept nogil:
        return suffixes_in(self.row(length), self.index.shard_count)

    cdef void advance(self, int64_t token) noexcept nogil:
        cdef int32_t length = min(self.match_length + 1, self.max_match)
        self.match_length = 0
        if not 0 <= token < self.index.vocab_size:
            return
        while length > 0:  # downwards, since a length is narrowed from the one below
            self.narrow(max(length - LANES, 0), length, <uint32_t>(token + 1))
            length -= LANES

    cdef void narrow(self, int32_t below, int32_t longest, uint32_t code) noexcept nogil:
        """Make the matches of `below` + 1 to `longest` tokens from those of one token less."""
        cdef int32_t shards = self.index.shard_count, s, length
        cdef const Shard* shard
        cdef Interval within
        cdef Probe[2 * LANES] ends
        cdef Probe* end
        for s in range(shards):
            shard = &self.index.shards[s]
            for length in range(longest, below, -1):
                within = bucket_of(shard, code) if length == 1 else self.row(length - 1)[s]
                end = ends + 2 * (length - 1 - below)
                end[0] = Probe(within.low, within.high, code, length - 1)
                end[1] = Probe(within.low, within.high, code + 1, length - 1)
            search_together(shard, ends, 2 * (longest - below))
            for length in range(longest, below, -1):
                end = ends + 2 * (length - 1 - below)
                self.row(length)[s] = Interval(end[0].low, max(end[0].low, end[1].low))
        for length in range(below + 1, longest + 1):
            if self.occurrences(length) > 0:
                self.match_length = max(self.match_length, length)
