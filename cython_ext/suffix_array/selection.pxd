# The most frequent continuations of a match, found in two passes.
#
# The first finds candidates in batches, largest ranges first: it samples a range of suffixes densely
# enough that no code frequent enough for the tree can hide between two samples, and then finds the
# ends of all codes of the batch together. The second takes candidates best-first. What is taken, and
# in which order, depends on the exact counts alone, not on the batches.
from common.heap cimport Entry
from common.types cimport int32_t, int64_t, uint32_t
from suffix_array.search cimport LANES, Interval, Probe, Sample, Shard

cdef enum:
    ABSENT = -2       # the node of a candidate that is not in the tree
    DENSITY = 2       # samples per code that is just frequent enough
    DEPTH_BITS = 17
    BATCH = 64        # ranges that are sampled together


cdef struct Tree:             # what was taken, in the arrays that the caller gets
    int32_t size
    int32_t capacity
    int32_t* token_ids
    int32_t* parents
    int32_t* contexts
    int64_t* counts
    int64_t* parent_counts


cdef struct Candidate:        # the match with a continuation of `depth` tokens
    int64_t count
    uint32_t code             # of its last token
    int32_t parent            # candidate without the last token; the first candidate is the match
    int32_t depth
    int32_t row               # its suffixes
    int32_t child             # newest candidate that continues it, then by `sibling`; 0 for none
    int32_t sibling
    int32_t node              # in the tree: -1 for the match, or ABSENT


cdef struct Range:            # suffixes of a candidate among whose next codes some are not known
    int32_t parent
    int32_t row


cdef struct Split:            # a range in the batch
    int32_t range             # its index
    const Interval* row       # its suffixes
    int32_t offset            # place of its codes in their suffixes
    int64_t spacing           # suffixes of a shard per sample
    bint complete             # no code of use is missing from those below
    int32_t samples           # first of its samples; those of each shard follow each other
    int32_t first_code
    int32_t codes


cdef struct Selection:
    const Shard* shards
    int32_t shard_count
    int64_t vocab_size
    int32_t codes_left        # candidates that there is room for
    int32_t searches_left     # codes of long ranges that may be looked for
    int32_t length            # of the match
    int32_t depth             # most tokens of a continuation
    int32_t wanted            # nodes that the tree has room for
    int32_t candidate_count
    int32_t range_count
    int32_t range_limit
    int32_t row_count
    int32_t frontier_size
    int32_t best_size
    int32_t split_count
    int32_t sample_count
    int32_t code_count
    Candidate* candidates     # [codes + 1]
    Range* ranges             # [range_limit]
    Entry* frontier            # [as many], heap of ranges; in the second pass of candidates
    Interval* rows            # [3 * codes + 1, shard_count]
    Entry* best                # [nodes + 1], heap of the `wanted` best candidates, the worst on top
    Sample* samples           # [2 * (LANES + shard_count)]
    uint32_t* found           # [LANES + shard_count], the codes of one split ...
    int64_t* most             # ... and how often they may occur
    Probe[2 * LANES] probes
    uint32_t[LANES] codes     # of all splits
    Split[BATCH] splits
