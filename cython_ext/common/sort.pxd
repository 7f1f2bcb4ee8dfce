# Sorting of whole numbers: what is sorted by is their upper half, what is sorted the lower one.
from common.types cimport int32_t, int64_t


cdef inline int64_t sort_key(int64_t by, int32_t what) noexcept nogil:
    return by * (<int64_t>1 << 32) + what


cdef inline int32_t key_value(int64_t key) noexcept nogil:
    """What a key stands for, a number of 0 or more."""
    return <int32_t>key


cdef inline void sort(int64_t* keys, Py_ssize_t n) noexcept nogil:
    """Ascending, in place, by Shell's method: for some hundreds of keys in half of the time of qsort."""
    cdef Py_ssize_t gap = n, i, j
    cdef int64_t key
    while gap > 1:
        gap = max(gap * 5 // 11, <Py_ssize_t>1)
        for i in range(gap, n):
            key, j = keys[i], i
            while j >= gap and keys[j - gap] > key:
                keys[j] = keys[j - gap]
                j -= gap
            keys[j] = key
