"""Steps of building a suffix array over token ids with a sorter that knows only bytes."""

import numpy as np

from suffix_array.codes cimport Text, code_at
from common.types cimport int32_t, int64_t, uint8_t, uint32_t


def rank_codes(const uint8_t[::1] codes, int32_t width, int64_t vocab_size):
    """A text's codes by their rank among those that occur, which sorts alike and may need less room.

    Args:
        codes: uint8 [length x width], the text; holds a zero.
        width: bytes per code.
        vocab_size: the highest code.

    Returns:
        (ranks, rank_width): uint8 [length x rank_width], big-endian. O(length + vocab_size).

    Raises:
        ValueError: a code lies beyond `vocab_size`.
    """
    cdef Text text = Text(&codes[0], codes.shape[0] // width, width)
    cdef int32_t[::1] ranks = np.zeros(vocab_size + 1, np.int32)
    cdef uint8_t[:, ::1] out
    cdef int64_t i, place
    cdef int32_t rank_width, rank
    cdef bint outside = False
    with nogil:
        for i in range(text.length):
            if code_at(&text, i) > vocab_size:
                outside = True
            else:
                ranks[code_at(&text, i)] = 1
    if outside:
        raise ValueError(f"codes: expected at most {vocab_size}")
    np.cumsum(ranks, out=np.asarray(ranks))
    rank_width = max((int(ranks[vocab_size] - 1).bit_length() + 7) // 8, 1)
    out = np.empty((text.length, rank_width), np.uint8)
    with nogil:
        for i in range(text.length):
            rank = ranks[code_at(&text, i)] - 1
            for place in range(rank_width - 1, -1, -1):
                out[i, place] = rank & 255
                rank >>= 8
    return np.asarray(out).reshape(-1), rank_width


def align_suffixes(const int32_t[::1] byte_suffixes, int32_t width, int64_t separators, uint32_t[::1] out):
    """The suffix array of a code text from that of its bytes.

    Args:
        byte_suffixes: int32 [length x width], suffix array of the text's bytes.
        width: bytes per code.
        separators: how many codes are 0; their suffixes come first and are left out.
        out: uint32 [length - separators], filled with code positions.

    Raises:
        ValueError: `out` has another length than the suffixes that remain. O(length x width).
    """
    cdef Py_ssize_t i
    cdef int64_t kept = -separators, n = out.shape[0]
    if byte_suffixes.shape[0] != (n + separators) * width:
        raise ValueError(
            f"expected {(n + separators) * width} byte suffixes, got {byte_suffixes.shape[0]}"
        )
    with nogil:
        for i in range(byte_suffixes.shape[0]):
            if byte_suffixes[i] % width == 0:
                if 0 <= kept < n:
                    out[kept] = <uint32_t>(byte_suffixes[i] // width)
                kept += 1
    if kept != n:
        raise ValueError(f"expected {n} suffixes of tokens, got {kept}")


def bucket_starts(const uint8_t[::1] codes, int32_t width, int32_t shift, uint32_t[::1] out):
    """First rank of every bucket, a bucket being the suffixes whose first code >> `shift` is equal.

    Args:
        codes: uint8 [length x width], the text.
        width: bytes per code.
        shift: bits dropped from a code.
        out: uint32 [buckets + 1]; its last entry becomes the number of suffixes. O(length).

    Raises:
        ValueError: a code lies in none of the buckets.
    """
    cdef Py_ssize_t i, buckets = out.shape[0] - 1
    cdef Text text = Text(&codes[0], codes.shape[0] // width, width)
    cdef uint32_t code, bucket
    cdef bint outside = False
    out[:] = 0
    with nogil:
        for i in range(text.length):
            code = code_at(&text, i)
            bucket = code >> shift
            if bucket >= buckets:
                outside = True
            elif code:
                out[bucket + 1] += 1
        for i in range(buckets):
            out[i + 1] += out[i]
    if outside:
        raise ValueError(f"a code lies beyond the {buckets} buckets of {1 << shift}")
