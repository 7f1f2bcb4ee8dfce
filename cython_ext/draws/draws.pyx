"""Tokens drawn from probabilities with the numbers of torch's generator on a CPU, of which few are needed.

A draw divides every probability by an exponentially distributed number and takes the largest quotient.
For each number torch takes 64 bits of a Mersenne Twister (Matsumoto and Nishimura 1998), u of them, and
-log(1 - u), which is at least u: a quotient that cannot win by u needs no logarithm.
"""

import numpy as np

from libc.math cimport log1p
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy

from common.types cimport int32_t, int64_t

cdef enum:
    WORDS = 624
    SHIFT = 397
    # The state that a generator of torch gives out: its size, and where its parts stand.
    STATE = 5056
    LEFT = 8
    NEXT = 16
    FIRST = 24

cdef double ERROR = 2.0**-50   # relative, of a logarithm
cdef float ROUNDING = 1 - 2.0**-20

NOBODY = -1   # the probabilities are no distribution
UNKNOWN = -2  # a number hangs on a logarithm's last bits


cdef struct Twister:
    uint32_t words[WORDS]
    int32_t left         # words that are left, and one
    int32_t next         # the first of these


cdef int read(const unsigned char[::1] state, Twister* t) except -1:
    cdef uint64_t word
    cdef Py_ssize_t i
    if state.shape[0] != STATE:
        raise ValueError(f"state: expected {STATE} bytes, got {state.shape[0]}")
    memcpy(&t.left, &state[LEFT], sizeof(int32_t))
    memcpy(&word, &state[NEXT], sizeof(uint64_t))
    if not 1 <= t.left <= WORDS or (t.left > 1 and word + t.left - 1 != WORDS):
        raise ValueError(f"state: expected one of a Mersenne Twister, got {t.left} and {word}")
    t.next = <int32_t>word
    for i in range(WORDS):
        memcpy(&word, &state[FIRST + i * sizeof(uint64_t)], sizeof(uint64_t))
        t.words[i] = <uint32_t>word
    return 0


cdef written(const unsigned char[::1] state, Twister* t):
    """The state as it is now, uint8 [n]; what it has besides stays."""
    out = np.array(state)
    cdef unsigned char[::1] now = out
    cdef uint64_t word = t.next
    cdef Py_ssize_t i
    memcpy(&now[LEFT], &t.left, sizeof(int32_t))
    memcpy(&now[NEXT], &word, sizeof(uint64_t))
    for i in range(WORDS):
        word = t.words[i]
        memcpy(&now[FIRST + i * sizeof(uint64_t)], &word, sizeof(uint64_t))
    return out


cdef inline uint32_t mixed(uint32_t high, uint32_t low) noexcept nogil:
    return (((high & <uint32_t>0x80000000) | (low & <uint32_t>0x7FFFFFFF)) >> 1) ^ (
        (-(low & 1)) & <uint32_t>0x9908B0DF
    )

cdef inline uint32_t tempered(uint32_t y) noexcept nogil:
    y ^= y >> 11
    y ^= (y << 7) & <uint32_t>0x9D2C5680
    y ^= (y << 15) & <uint32_t>0xEFC60000
    return y ^ (y >> 18)

cdef void twist(uint32_t* w) noexcept nogil:
    """The next words."""
    cdef Py_ssize_t i
    for i in range(WORDS - SHIFT):
        w[i] = w[i + SHIFT] ^ mixed(w[i], w[i + 1])
    for i in range(WORDS - SHIFT, WORDS - 1):
        w[i] = w[i + SHIFT - WORDS] ^ mixed(w[i], w[i + 1])
    w[WORDS - 1] = w[SHIFT - 1] ^ mixed(w[WORDS - 1], w[0])

cdef void skip(Twister* t, int64_t count) noexcept nogil:
    """Leave so many words behind."""
    while count > t.left - 1:
        count -= t.left - 1
        twist(t.words)
        t.left, t.next = WORDS + 1, 0
    t.left -= <int32_t>count
    t.next += <int32_t>count


cdef struct Best:
    float quotient  # negative until there is one
    float least     # a probability that is not above this times u x 2^21 cannot win
    int64_t token
    bint unknown


cdef inline void look(Best* best, float prob, uint32_t high, uint32_t low, int64_t token) noexcept nogil:
    """Find out whether a token's quotient is larger."""
    cdef uint64_t bits = (<uint64_t>high << 32 | low) & ((<uint64_t>1 << 53) - 1)
    cdef double exact = -log1p(-(<double>bits * 2.0**-53))
    cdef float noise = <float>(exact * (1 - ERROR)), quotient
    if not noise > 0 or noise != <float>(exact * (1 + ERROR)):
        best.unknown = True
        return
    quotient = prob / noise
    if quotient > best.quotient:
        best.quotient, best.token = quotient, token
        best.least = quotient * ROUNDING * <float>(2.0**-21)


cdef void look_at_all(Best* best, const float* probs, const uint32_t* words, int64_t first, Py_ssize_t n) noexcept nogil:
    """Find out about n tokens from the first one on, of which `words` has two each."""
    cdef uint32_t high[WORDS]
    cdef Py_ssize_t i
    cdef int32_t larger = 0
    cdef float least = best.least
    for i in range(n):
        high[i] = tempered(words[2 * i])
    for i in range(n):
        # What is no number counts as larger.
        larger += not probs[i] <= least * <float><int32_t>(high[i] & 0x1FFFFF)
    if not larger:
        return
    for i in range(n):
        if not probs[i] >= 0:
            best.unknown = True
        elif probs[i] > best.least * <float><int32_t>(high[i] & 0x1FFFFF):
            look(best, probs[i], high[i], tempered(words[2 * i + 1]), first + i)


def token(const float[::1] probs, const unsigned char[::1] state):
    """The token that `torch.multinomial` draws of probabilities with a generator in a state.

    Returns it, or NOBODY or UNKNOWN, and the state after it: uint8 [n]. Raises ValueError for a state that
    is no generator's on a CPU.
    """
    cdef Twister t
    cdef uint32_t words[2 * WORDS]
    cdef Best best = Best(-1, -1, NOBODY, False)
    cdef Py_ssize_t n = probs.shape[0], done = 0, held = 0, pairs
    read(state, &t)
    with nogil:
        while done < n:
            if t.left == 1:
                twist(t.words)
                t.left, t.next = WORDS + 1, 0
            memcpy(words + held, t.words + t.next, (t.left - 1) * sizeof(uint32_t))
            held += t.left - 1
            pairs = min(held // 2, n - done)
            look_at_all(&best, &probs[done], words, done, pairs)
            done += pairs
            # The first word of a pair that is cut in two is here.
            if done == n:
                t.next += t.left - 1 - <int32_t>(held - 2 * pairs)
                t.left = 1 + <int32_t>(held - 2 * pairs)
            else:
                words[0], held = words[2 * pairs], held - 2 * pairs
                t.next, t.left = WORDS, 1
    if best.unknown:
        best.token = UNKNOWN
    elif not best.quotient > 0:
        best.token = NOBODY
    return best.token, written(state, &t)


def skipped(const unsigned char[::1] state, int64_t count):
    """The state behind so many exponentially distributed numbers, uint8 [n]; raises as `token` does."""
    cdef Twister t
    read(state, &t)
    with nogil:
        skip(&t, 2 * count)
    return written(state, &t)
