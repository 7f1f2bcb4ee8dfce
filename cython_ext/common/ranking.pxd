# The nodes of a tree by their probability.
from libc.stdlib cimport qsort

from common.blocks cimport resized
from common.types cimport int32_t


cdef struct Ranked:
    float prob
    int32_t node


cdef inline int by_probability(const void* a, const void* b) noexcept nogil:
    """Higher probability first; of equal ones the earlier node, which is no descendant."""
    cdef const Ranked* x = <const Ranked*>a
    cdef const Ranked* y = <const Ranked*>b
    if x.prob != y.prob:
        return -1 if x.prob > y.prob else 1
    return -1 if x.node < y.node else 1


cdef inline Ranked* ranking(const float* probs, Py_ssize_t n) except NULL:
    """The n nodes by falling probability, for the caller to free."""
    cdef Py_ssize_t i
    cdef Ranked* ranked = <Ranked*>resized(NULL, n * sizeof(Ranked))
    for i in range(n):
        ranked[i] = Ranked(probs[i], <int32_t>i)
    qsort(ranked, n, sizeof(Ranked), by_probability)
    return ranked
