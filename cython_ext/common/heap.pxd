# A binary heap of indices by key. Entries are small; what they stand for stays where it is.
from common.types cimport int32_t, int64_t


cdef struct Entry:
    double key      # highest first; whole numbers are exact up to 2^53
    int64_t tie     # the lowest of equal keys first
    int32_t index


cdef inline bint before(const Entry* a, const Entry* b) noexcept nogil:
    return a.key > b.key or (a.key == b.key and a.tie < b.tie)


cdef inline void push(Entry* heap, int32_t* size, Entry entry) noexcept nogil:
    """Add an entry; `heap` has room for it. O(log size)."""
    cdef int32_t i = size[0], up
    size[0] = i + 1
    while i > 0:
        up = (i - 1) >> 1
        if not before(&entry, &heap[up]):
            break
        heap[i] = heap[up]
        i = up
    heap[i] = entry


cdef inline Entry pop(Entry* heap, int32_t* size) noexcept nogil:
    """Take the first entry of a heap that is not empty. O(log size)."""
    cdef Entry top = heap[0], last
    cdef int32_t i = 0, child = 1
    size[0] -= 1
    last = heap[size[0]]
    while child < size[0]:
        if child + 1 < size[0] and before(&heap[child + 1], &heap[child]):
            child += 1
        if not before(&heap[child], &last):
            break
        heap[i] = heap[child]
        i, child = child, 2 * child + 1
    heap[i] = last
    return top
