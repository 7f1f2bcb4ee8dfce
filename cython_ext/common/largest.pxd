# The largest of many numbers, of equal ones the first.
from common.types cimport int32_t

cdef enum:
    BLOCK = 256  # numbers looked at together


cdef inline void insert_among(float* values, int32_t* ids, Py_ssize_t count, float value, int32_t id) noexcept nogil:
    """Put a value into its place among `count` descending ones, behind equal ones; the last one goes."""
    cdef Py_ssize_t place = count - 1
    while place > 0 and values[place - 1] < value:
        values[place] = values[place - 1]
        ids[place] = ids[place - 1]
        place -= 1
    values[place] = value
    ids[place] = id


cdef inline void compete(
    const float* block, Py_ssize_t n, Py_ssize_t first, Py_ssize_t k, float* values, int32_t* ids
) noexcept nogil:
    """Let n numbers, the first of which is number `first`, take places among the k largest before them."""
    cdef Py_ssize_t i
    cdef int32_t larger = 0
    cdef float least = values[k - 1]
    # Few blocks hold one of the largest, and a count compiles to vector instructions.
    for i in range(n):
        larger += block[i] > least
    if larger:
        for i in range(n):
            if block[i] > values[k - 1]:
                insert_among(values, ids, k, block[i], <int32_t>(first + i))


cdef inline void largest(const float* row, Py_ssize_t n, Py_ssize_t k, float* values, int32_t* ids) noexcept nogil:
    """The k largest of n values, descending."""
    cdef Py_ssize_t i
    for i in range(k):
        insert_among(values, ids, i + 1, row[i], <int32_t>i)
    i = k
    while i < n:
        compete(row + i, min(<Py_ssize_t>BLOCK, n - i), i, k, values, ids)
        i += BLOCK
