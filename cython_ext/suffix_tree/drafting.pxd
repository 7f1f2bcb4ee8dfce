# What drafting from suffix trees keeps: drafts by score, and witnesses that are blended.
from suffix_tree.store cimport Place, Store
from common.types cimport int32_t, token_t

cdef enum:
    LENGTH_BUCKETS = 10
    SUPPORT_BUCKETS = 6
    SHARE_BUCKETS = 8
    RANKS = 3
    WITNESSES = 8   # at most, in both trees together
    NAMES = 8       # tokens that a witness may name

cdef struct Candidate:
    double prob
    double share    # probability of a sibling per count; 0 where the edge leaves no choice
    Place place
    int32_t parent  # drafted node

cdef struct Draft:
    int32_t size
    double score
    int32_t* tokens
    int32_t* parents
    double* probs

cdef struct Witness:
    Store* store
    Place place
    int32_t source
    int32_t unseen  # tokens by which the match is longer than the place is deep

cdef struct Guess:
    float prob
    token_t token
    int32_t evidence, parent

cdef struct Blend:
    int32_t budget
    token_t vocab_size   # no id from here on is drafted
    float min_prob
    bint path            # without branches
    const float* rates   # by class
    Witness* witnesses   # [budget + 1, WITNESSES], of the root and the drafted nodes
    int32_t* witness_counts
    Guess* heap
    int32_t queued
    int32_t size
    token_t* tokens
    int32_t* parents
    float* probs
    int32_t* classes
