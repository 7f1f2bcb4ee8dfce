"""Rows of scores where they lie in the host's memory, of four bytes or two: the largest of them."""

import numpy as np

from libc.math cimport INFINITY
from libc.stdint cimport int64_t, uint16_t, uintptr_t
from libc.stdlib cimport free

from common.blocks cimport resized
from common.largest cimport BLOCK, compete, insert_among
from common.types cimport int32_t

cdef extern from "simd.h" nogil:
    float skinny_float_of_f16(uint16_t half)
    float skinny_float_of_bf16(uint16_t half)

cdef extern from *:
    """
    #define LANES 16

    /* The largest of `count` numbers, a multiple of LANES, and whether one of them is NaN: then another may be
     * larger. The compiler makes vectors of the inner loops. */
    static inline float block_largest(const float *block, int count, int32_t *unordered) {
        float lanes[LANES];
        int32_t found = 0;
        for (int i = 0; i < count; i++) found += block[i] != block[i];
        *unordered = found;
        for (int j = 0; j < LANES; j++) lanes[j] = block[j];
        for (int i = LANES; i < count; i += LANES)
            for (int j = 0; j < LANES; j++) lanes[j] = block[i + j] > lanes[j] ? block[i + j] : lanes[j];
        for (int j = 1; j < LANES; j++) lanes[0] = lanes[j] > lanes[0] ? lanes[j] : lanes[0];
        return lanes[0];
    }
    """
    float block_largest(const float* block, int count, int32_t* unordered) noexcept nogil

BLOCK_COLUMNS = BLOCK

cdef enum:
    KIND_FLOAT32
    KIND_BFLOAT16
    KIND_FLOAT16


cdef const float* block_of(
    const char* row, int kind, Py_ssize_t first, Py_ssize_t end, float* buffer
) noexcept nogil:
    """Numbers [first, end) of a row, at most BLOCK, in float32: where they lie or in the buffer, there filled
    up with −∞."""
    cdef Py_ssize_t i, n = end - first
    cdef const uint16_t* halves = <const uint16_t*>row + first
    if kind == KIND_FLOAT32 and n == BLOCK:
        return <const float*>row + first
    if kind == KIND_BFLOAT16:
        for i in range(n):
            buffer[i] = skinny_float_of_bf16(halves[i])
    elif kind == KIND_FLOAT16:
        for i in range(n):
            buffer[i] = skinny_float_of_f16(halves[i])
    else:
        for i in range(n):
            buffer[i] = (<const float*>row)[first + i]
    for i in range(n, BLOCK):
        buffer[i] = -INFINITY
    return buffer


cdef class Scores:
    """Scores [rows, columns] that somebody keeps where they are.

    Args:
        owner: keeps them.
        address: where the first lies; the others follow without gaps.
        rows, columns: how many.
        dtype: "float32", "bfloat16" or "float16".
    """

    cdef object _owner
    cdef const char* _data
    cdef readonly Py_ssize_t rows, columns
    cdef Py_ssize_t _row_bytes
    cdef int _kind

    def __cinit__(self, owner, uintptr_t address, Py_ssize_t rows, Py_ssize_t columns, str dtype):
        kinds = ("float32", "bfloat16", "float16")
        if dtype not in kinds:
            raise ValueError(f"dtype: expected one of {kinds}, got {dtype!r}")
        self._owner, self._data = owner, <const char*>address
        self.rows, self.columns, self._kind = rows, columns, kinds.index(dtype)
        self._row_bytes = columns * (4 if self._kind == KIND_FLOAT32 else 2)

    def __len__(self):
        return self.rows

    cdef const char* _row(self, Py_ssize_t row) except NULL:
        if not (0 <= row < self.rows and self.columns):
            raise IndexError(f"row: expected 0 to {self.rows - 1} of some columns, got {row}")
        return self._data + row * self._row_bytes

    def argmax(self, Py_ssize_t row):
        """The column of a row's largest score, of equal ones the first; a NaN comes before all."""
        cdef const char* data = self._row(row)
        cdef Py_ssize_t found
        with nogil:
            found = self._argmax(data)
        return found

    cdef Py_ssize_t _argmax(self, const char* data) noexcept nogil:
        cdef float buffer[BLOCK]
        cdef const float* block
        cdef float best = -INFINITY, value
        cdef Py_ssize_t first = 0, best_first = 0, i
        cdef int32_t unordered = 0
        while first < self.columns:
            block = block_of(data, self._kind, first, min(first + BLOCK, self.columns), buffer)
            value = block_largest(block, BLOCK, &unordered)
            if unordered:
                best_first = first
                break
            if value > best:
                best, best_first = value, first
            first += BLOCK
        block = block_of(data, self._kind, best_first, min(best_first + BLOCK, self.columns), buffer)
        for i in range(BLOCK):
            if block[i] != block[i] if unordered else block[i] == best:
                return best_first + i
        return best_first

    def starts_with_nan(self):
        """Whether the first score of a row is NaN, in any of them."""
        cdef Py_ssize_t i
        cdef float buffer[BLOCK]
        for i in range(self.rows if self.columns else 0):
            block_of(self._data + i * self._row_bytes, self._kind, 0, 1, buffer)
            if buffer[0] != buffer[0]:
                return True
        return False

    def top_k(self, const int64_t[::1] rows, Py_ssize_t k, Py_ssize_t columns):
        """The k largest of the first `columns` scores of some rows, of equal ones the first.

        Returns their columns, int32 [n, k], and the scores, float32 [n, k], descending.
        O(n · columns), without Python's lock.
        """
        cdef Py_ssize_t count = rows.shape[0], i
        if not 1 <= k <= columns <= self.columns:
            raise ValueError(f"k: expected 1 to {columns} of {self.columns} columns, got {k}")
        for i in range(count):
            self._row(rows[i])
        ids_out, values_out = np.empty((count, k), np.int32), np.empty((count, k), np.float32)
        cdef int32_t[:, ::1] ids = ids_out
        cdef float[:, ::1] values = values_out
        with nogil:
            for i in range(count):
                self._top_k(rows[i], k, columns, &values[i, 0], &ids[i, 0])
        return ids_out, values_out

    cdef void _top_k(
        self, Py_ssize_t row, Py_ssize_t k, Py_ssize_t columns, float* values, int32_t* ids
    ) noexcept nogil:
        cdef const char* data = self._data + row * self._row_bytes
        cdef float buffer[BLOCK]
        cdef Py_ssize_t first, end
        for first in range(k):
            block_of(data, self._kind, first, first + 1, buffer)
            insert_among(values, ids, first + 1, buffer[0], <int32_t>first)
        first = k
        while first < columns:
            end = min((first // BLOCK + 1) * BLOCK, columns)
            compete(block_of(data, self._kind, first, end, buffer), end - first, first, k, values, ids)
            first = end


def peaks_of(const float[::1] numbers):
    """The largest of each `BLOCK_COLUMNS` numbers, none of which is NaN: float32 [blocks]."""
    cdef float buffer[BLOCK]
    cdef int32_t unordered
    cdef Py_ssize_t n = numbers.shape[0], parts = (n + BLOCK - 1) // BLOCK, i
    found = np.empty(parts, np.float32)
    cdef float[::1] largest = found
    for i in range(parts):
        largest[i] = block_largest(
            block_of(<const char*>&numbers[0], KIND_FLOAT32, i * BLOCK, min((i + 1) * BLOCK, n), buffer), BLOCK,
            &unordered,
        )
    return found


def reaching(
    const float[::1] near, const float[::1] bounds, const float[::1] most, float norm, Py_ssize_t k, float greatest,
    float tolerance, float margin,
):
    """Which of many numbers may be among the k largest, each known to within a bound of its own.

    Args:
        near: float32 [n], finite.
        bounds, most: float32 [n], what, times `norm`, is how far each may be off; and the largest of each block
            of these, see `peaks_of`.
        greatest, tolerance, margin: what the k-th of their lower bounds must not exceed, and by which
            share of it and by how much more others may fall short of it.

    Returns int64, ascending: those whose upper bounds reach the k-th largest lower bound.
    """
    cdef Py_ssize_t n = near.shape[0], parts = most.shape[0], first, end, i, b, count = 0
    if not (bounds.shape[0] == n and 1 <= k <= n and parts == (n + BLOCK - 1) // BLOCK):
        raise ValueError(f"k: expected 1 to {n}, and as many bounds, got {k} and {bounds.shape[0]}")
    cdef float* upper = <float*>resized(NULL, (parts + k) * sizeof(float) + k * sizeof(int32_t))
    cdef float* lower = upper + parts
    cdef int32_t* ids = <int32_t*>(lower + k)
    cdef float buffer[BLOCK]
    cdef float least, peak
    cdef int32_t unordered
    with nogil:
        for i in range(k):
            lower[i] = -INFINITY
        for b in range(parts):
            first, end = b * BLOCK, min((b + 1) * BLOCK, n)
            peak = block_largest(
                block_of(<const char*>&near[0], KIND_FLOAT32, first, end, buffer), BLOCK, &unordered
            )
            upper[b] = peak + norm * most[b]
            # One of the block is known to be no less; the exact number is found below.
            if peak - norm * most[b] > lower[k - 1]:
                insert_among(lower, ids, k, peak - norm * most[b], 0)
        least = lower[k - 1]
        for i in range(k):
            lower[i] = -INFINITY
        for b in range(parts):
            if upper[b] < least:
                continue
            first, end = b * BLOCK, min((b + 1) * BLOCK, n)
            for i in range(first, end):
                buffer[i - first] = near[i] - norm * bounds[i]
            compete(buffer, end - first, first, k, lower, ids)
            for i in range(first, end):
                buffer[i - first] = near[i] + norm * bounds[i]
            upper[b] = block_largest(
                block_of(<const char*>buffer, KIND_FLOAT32, 0, end - first, buffer), BLOCK, &unordered
            )
        least = min(lower[k - 1] - margin, greatest)
        least -= tolerance * abs(least) + margin
        for b in range(parts):
            for i in range(b * BLOCK, min((b + 1) * BLOCK, n) if upper[b] >= least else 0):
                count += near[i] + norm * bounds[i] >= least
    found = np.empty(count, np.int64)
    cdef int64_t[::1] out = found
    count = 0
    for b in range(parts):
        for i in range(b * BLOCK, min((b + 1) * BLOCK, n) if upper[b] >= least else 0):
            if near[i] + norm * bounds[i] >= least:
                out[count] = i
                count += 1
    free(upper)
    return found
