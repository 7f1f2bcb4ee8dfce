"""Tokens drawn from probabilities with the numbers of torch's generator on a CPU, of which few are needed.

A draw divides every probability by an exponentially distributed number and takes the largest quotient.
For each number torch takes 64 bits of a Mersenne Twister (Matsumoto and Nishimura 1998), u of them, and
-log(1 - u), which is at least u: a quotient that cannot win by u needs no logarithm.
"""

import numpy as np

from libc.math cimport INFINITY, log, log1p
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


cdef struct Pairs:
    uint32_t words[2 * WORDS]  # two for each number
    Py_ssize_t held


cdef Py_ssize_t next_pairs(Twister* t, Pairs* p, Py_ssize_t most) noexcept nogil:
    """Take the words that are left, or the next ones; of how many numbers there are both, at most so many."""
    if t.left == 1:
        twist(t.words)
        t.left, t.next = WORDS + 1, 0
    memcpy(p.words + p.held, t.words + t.next, (t.left - 1) * sizeof(uint32_t))
    p.held += t.left - 1
    return min(p.held // 2, most)


cdef void leave_pairs(Twister* t, Pairs* p, Py_ssize_t pairs, bint last) noexcept nogil:
    """Leave so many numbers behind; the first word of a pair that is cut in two stays, and behind the last one
    all others."""
    cdef int32_t rest = <int32_t>(p.held - 2 * pairs)
    if last:
        t.next += t.left - 1 - rest
        t.left = 1 + rest
    else:
        p.words[0], p.held = p.words[2 * pairs], rest
        t.next, t.left = WORDS, 1


def token(const float[::1] probs, const unsigned char[::1] state):
    """The token that `torch.multinomial` draws of probabilities with a generator in a state.

    Returns it, or NOBODY or UNKNOWN, and the state after it: uint8 [n]. Raises ValueError for a state that
    is no generator's on a CPU.
    """
    cdef Twister t
    cdef Pairs p
    cdef Best best = Best(-1, -1, NOBODY, False)
    cdef Py_ssize_t n = probs.shape[0], done = 0, pairs
    p.held = 0
    read(state, &t)
    with nogil:
        while done < n:
            pairs = next_pairs(&t, &p, n - done)
            look_at_all(&best, &probs[done], &p.words[0], done, pairs)
            done += pairs
            leave_pairs(&t, &p, pairs, done == n)
    if best.unknown:
        best.token = UNKNOWN
    elif not best.quotient > 0:
        best.token = NOBODY
    return best.token, written(state, &t)


cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>

    /* Whether one of n numbers may reach `least`, once -log(u) is added to it, u having these 21 bits first: u is
     * at least 2^k of them, k being the place of the first one. The compiler makes vectors of the loop. */
    static inline int32_t any_reaches(const float *high, const uint32_t *bits, long n, float least) {
        int32_t found = 0;
        for (long i = 0; i < n; i++) {
            const float number = (float)(int32_t)(bits[i] & 0x1fffff);
            uint32_t exponent;
            memcpy(&exponent, &number, 4);
            found += !(high[i] + 0.69314725f * (float)(148 - (int32_t)(exponent >> 23)) < least);
        }
        return found;
    }
    """
    int32_t any_reaches(const float* high, const uint32_t* bits, long n, float least) noexcept nogil


cdef inline float gain_of(uint32_t high, uint32_t low) noexcept nogil:
    """-log of the number that 64 bits become."""
    cdef uint64_t bits = (<uint64_t>high << 32 | low) & ((<uint64_t>1 << 53) - 1)
    return <float>-log(-log1p(-<double>max(bits, 1) * 2.0**-53))


cdef struct Reaching:
    const float* low
    const float* high
    int64_t* ids
    float* gains
    Py_ssize_t found
    float* best        # the greatest of low plus gain, ascending
    Py_ssize_t count


cdef void reach(Reaching* r, const uint32_t* words, int64_t first, Py_ssize_t n) noexcept nogil:
    """Find those of n tokens from the first one on, of which `words` has two each, that may be among the best."""
    cdef uint32_t bits[WORDS]
    cdef Py_ssize_t i, j
    cdef float gain, value
    for i in range(n):
        bits[i] = tempered(words[2 * i])
    if not any_reaches(r.high + first, bits, n, r.best[0]):
        return
    for i in range(n):
        if not r.high[first + i] > -INFINITY or not any_reaches(r.high + first + i, bits + i, 1, r.best[0]):
            continue
        gain = gain_of(bits[i], tempered(words[2 * i + 1]))
        if r.high[first + i] + gain < r.best[0]:
            continue
        r.ids[r.found], r.gains[r.found] = first + i, gain
        r.found += 1
        value = r.low[first + i] + gain
        if value > r.best[0]:
            j = 1
            while j < r.count and r.best[j] < value:
                r.best[j - 1] = r.best[j]
                j += 1
            r.best[j - 1] = value


def reaching(const float[::1] low, const float[::1] high, Py_ssize_t count, const unsigned char[::1] state):
    """The tokens that may be among the first ones once what a draw adds to them is known: -log of its number each.

    So logarithms of probabilities, up to a constant, have their greatest sum with it where
    `torch.multinomial` would draw, up to rounding.

    Args:
        low, high: float32 [n], bounds of each token's; −∞ of one that is none.
        count: how many first ones.
        state: as for `token`.

    Returns:
        int64 [m] tokens, ascending, whose upper bound reaches what so many lower ones exceed; float32 [m], what
        is added to each; and the state after the draw.
    """
    cdef Twister t
    cdef Pairs p
    cdef Py_ssize_t n = low.shape[0], done = 0, pairs, kept = 0, i
    p.held = 0
    if high.shape[0] != n or count < 1:
        raise ValueError(f"high: expected {n} numbers and a positive count, got {high.shape[0]}, {count}")
    read(state, &t)
    ids, gains, best = np.empty(n, np.int64), np.empty(n, np.float32), np.full(count, -np.inf, np.float32)
    cdef int64_t[::1] found = ids
    cdef float[::1] added = gains, greatest = best
    cdef Reaching r
    if n == 0:
        return ids, gains, np.array(state)
    r = Reaching(&low[0], &high[0], &found[0], &added[0], 0, &greatest[0], count)
    with nogil:
        while done < n:
            pairs = next_pairs(&t, &p, n - done)
            reach(&r, &p.words[0], done, pairs)
            done += pairs
            leave_pairs(&t, &p, pairs, done == n)
        for i in range(r.found):
            if high[found[i]] + added[i] >= greatest[0]:
                found[kept], added[kept] = found[i], added[i]
                kept += 1
    return ids[:kept].copy(), gains[:kept].copy(), written(state, &t)


def skipped(const unsigned char[::1] state, int64_t count):
    """The state behind so many exponentially distributed numbers, uint8 [n]; raises as `token` does."""
    cdef Twister t
    read(state, &t)
    with nogil:
        skip(&t, 2 * count)
    return written(state, &t)
