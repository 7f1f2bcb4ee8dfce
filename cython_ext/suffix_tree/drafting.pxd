# What drafting by score keeps.
from suffix_tree.store cimport Place
from common.heap cimport Entry
from common.types cimport int32_t

cdef struct Candidate:
    double prob
    double share    # probability of a sibling per count; 0 where the edge leaves no choice
    Place place
    int32_t parent  # drafted node

cdef struct CandidateHeap:
    Candidate* candidates
    Entry* entries
    int32_t made, size  # candidates, and entries of those not drafted

cdef struct Draft:
    int32_t size
    double score
    int32_t* tokens
    int32_t* parents
    double* probs
