"""Tokens drawn from probabilities with the numbers of torch's generator on a CPU, of which few are needed.

A draw divides every probability by an exponentially distributed number and takes the largest quotient.
For each number torch takes 64 bits of a Mersenne Twister (Matsumoto and Nishimura 1998), u of them, and
-log(1 - u), which is at least u: a quotient that cannot win by u needs no logarithm.
"""

import numpy as np

from libc.math cimport INFINITY, exp, fabs, isfinite, log, log1p
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcpy

from common.blocks cimport resized
from common.twister cimport gain_of, tempered
from common.types cimport int32_t, int64_t, token_t

cdef enum:
    WORDS = 624
    SHIFT = 397
    # The state that a generator of torch gives out: its size, and where its parts stand.
    STATE = 5056
    LEFT = 8
    NEXT = 16
    FIRST = 24
    PART = 512  # numbers looked at together

cdef double ERROR = 2.0**-50   # relative, of a logarithm
cdef float ROUNDING = 1 - 2.0**-20

NOBODY = -1   # the probabilities are no distribution
UNKNOWN = -2  # rounding may decide

# Scores closer than this, as logarithms, and shares closer to a bound may change places when probabilities are
# rounded. One that is less than the greatest by so much may be rounded to zero.
CERTAIN_LEAD = 1e-4
CERTAIN_DEPTH = 80.0
cdef double LEAD = CERTAIN_LEAD, DEPTH = CERTAIN_DEPTH


cdef inline void twist(uint32_t* w, Py_ssize_t n) noexcept nogil:
    """The n words from `w` on, behind the WORDS in front of it."""
    cdef Py_ssize_t i
    cdef uint32_t high, low
    for i in range(n):
        high, low = w[i - WORDS], w[i - WORDS + 1]
        w[i] = w[i + SHIFT - WORDS] ^ (
            (((high & <uint32_t>0x80000000) | (low & <uint32_t>0x7FFFFFFF)) >> 1)
            ^ ((-(low & 1)) & <uint32_t>0x9908B0DF)
        )


cdef Py_ssize_t read(const unsigned char[::1] state, uint32_t* words) except -1:
    """Take a state's block of words; returns how many of them were given out."""
    cdef int32_t left
    cdef uint64_t word
    cdef Py_ssize_t i
    if state.shape[0] != STATE:
        raise ValueError(f"state: expected {STATE} bytes, got {state.shape[0]}")
    memcpy(&left, &state[LEFT], sizeof(int32_t))
    memcpy(&word, &state[NEXT], sizeof(uint64_t))
    if not 1 <= left <= WORDS or (left > 1 and word + left - 1 != WORDS):
        raise ValueError(f"state: expected one of a Mersenne Twister, got {left} and {word}")
    for i in range(WORDS):
        memcpy(&word, &state[FIRST + i * sizeof(uint64_t)], sizeof(uint64_t))
        words[i] = <uint32_t>word
    return WORDS + 1 - left


cdef written(const unsigned char[::1] state, const uint32_t* words, Py_ssize_t given):
    """A state whose block has these words, of which so many were given out, uint8 [n]; what it has besides stays."""
    out = np.array(state)
    cdef unsigned char[::1] now = out
    cdef int32_t left = <int32_t>(WORDS + 1 - given)
    cdef uint64_t word = given
    cdef Py_ssize_t i
    memcpy(&now[LEFT], &left, sizeof(int32_t))
    memcpy(&now[NEXT], &word, sizeof(uint64_t))
    for i in range(WORDS):
        word = words[i]
        memcpy(&now[FIRST + i * sizeof(uint64_t)], &word, sizeof(uint64_t))
    return out


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
    cdef uint32_t high[PART]
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
    cdef uint32_t bits[PART]
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


cdef Py_ssize_t count_kept(const float* logits, Py_ssize_t n, int64_t top_k, Py_ssize_t all) noexcept nogil:
    """How many of n descending logits of the greatest a top-k leaves, equals of the last one included; −1: unknown."""
    cdef Py_ssize_t kept = n
    if 0 < top_k < n:
        kept = top_k
        while kept < n and logits[kept] == logits[top_k - 1]:
            kept += 1
        if kept < n and logits[top_k - 1] - logits[kept] <= 1e-6 * fabs(logits[top_k - 1]):
            return -1
    return kept if kept < n or n == all else -1


cdef int32_t is_kept(
    const double* depths, Py_ssize_t n, Py_ssize_t place, double top_p, double min_p
) noexcept nogil:
    """Whether top-p and min-p leave one of n tokens, whose logits lie so far below the first: 1, 0, or −1: unknown."""
    cdef Py_ssize_t i
    cdef double below = 0, equal = 0, total, own = exp(-depths[place]), left_out = 1 - top_p, surplus
    if depths[place] == 0 and (n == 1 or depths[1] > LEAD):
        return 1  # the likeliest one
    if top_p < 1:
        total = 0
        for i in range(n):
            total += exp(-depths[i])
            if fabs(depths[i] - depths[place]) <= LEAD:
                equal += exp(-depths[i])
            elif depths[i] > depths[place]:
                below += exp(-depths[i])
        if (below + equal) / total < left_out - LEAD:
            return 0
        if (below + own) / total < left_out + LEAD:
            return -1
    if min_p > 0:
        surplus = -depths[place] - log(min_p)
        if fabs(surplus) < LEAD:
            return -1
        return surplus > 0
    return 1


cdef class Numbers:
    """The numbers that a generator in a state gives to a draw from some probabilities.

    Args:
        count: how many.

    Attributes:
        words: uint32 [2 x count], of the generator, two for each number, before they are tempered.
    """

    cdef readonly object words
    cdef uint32_t* first
    cdef Py_ssize_t count
    cdef object block  # uint32, whole blocks of words

    def __cinit__(self, Py_ssize_t count):
        if count < 0:
            raise ValueError(f"count: expected at least 0, got {count}")
        self.count = count
        self.block = np.empty((2 * count + 2 * WORDS - 1) // WORDS * WORDS + WORDS, np.uint32)
        self.words = self.block[:0]

    def __len__(self):
        return self.count

    def begin(self, const unsigned char[::1] state):
        """Take the numbers behind a generator's state, in place of those that there are.

        Returns the state after them, uint8 [n]. Raises ValueError for a state that is no generator's on a CPU.
        """
        cdef uint32_t[::1] block = self.block
        cdef Py_ssize_t begin = read(state, &block[0]), end = begin + 2 * self.count, i = WORDS, last
        with nogil:
            while i < end:
                twist(&block[i], WORDS - SHIFT)
                twist(&block[i + WORDS - SHIFT], SHIFT)
                i += WORDS
        last = (max(end, 1) - 1) // WORDS * WORDS
        self.words = self.block[begin:end]
        self.first = &block[0] + begin
        return written(state, &block[last], end - last)

    def token(self, const float[::1] probs):
        """The token that `torch.multinomial` draws of probabilities by these numbers, or NOBODY or UNKNOWN."""
        cdef Best best = Best(-1, -1, NOBODY, False)
        cdef Py_ssize_t done = 0, n
        self.check(probs)
        with nogil:
            while done < self.count:
                n = min(self.count - done, <Py_ssize_t>PART)
                look_at_all(&best, &probs[done], self.first + 2 * done, done, n)
                done += n
        if best.unknown:
            return UNKNOWN
        return best.token if best.quotient > 0 else NOBODY

    def reaching(self, const float[::1] low, const float[::1] high, Py_ssize_t count):
        """The tokens that may be among the first ones once what a draw adds to them is known: -log of its number
        each.

        So logarithms of probabilities, up to a constant, have their greatest sum with it where
        `torch.multinomial` would draw, up to rounding.

        Args:
            low, high: float32 [n], bounds of each token's; −∞ of one that is none.
            count: how many first ones.

        Returns:
            int64 [m] tokens, ascending, whose upper bound reaches what so many lower ones exceed; and float32
            [m], what is added to each.
        """
        cdef Py_ssize_t n = self.count, done = 0, kept = 0, i, part
        if count < 1:
            raise ValueError(f"count: expected at least 1, got {count}")
        self.check(low)
        self.check(high)
        ids, gains, best = np.empty(n, np.int64), np.empty(n, np.float32), np.full(count, -np.inf, np.float32)
        cdef int64_t[::1] found = ids
        cdef float[::1] added = gains, greatest = best
        cdef Reaching r
        if n == 0:
            return ids, gains
        r = Reaching(&low[0], &high[0], &found[0], &added[0], 0, &greatest[0], count)
        with nogil:
            while done < n:
                part = min(n - done, <Py_ssize_t>PART)
                reach(&r, self.first + 2 * done, done, part)
                done += part
            for i in range(r.found):
                if high[found[i]] + added[i] >= greatest[0]:
                    found[kept], added[kept] = found[i], added[i]
                    kept += 1
        return ids[:kept].copy(), gains[:kept].copy()

    def token_among(
        self, const token_t[::1] ids, const float[::1] logits, int64_t top_k, double temperature, double top_p,
        double min_p,
    ):
        """The token that `torch.multinomial` draws of softmax(logits / temperature) by these numbers where only the
        `top_k` greatest logits, and of them what top-p and then min-p leave, have any probability.

        Args:
            ids, logits: int32 and float32 [n], tokens of the greatest logits, descending; more than `top_k`, or all.

        Returns it, or UNKNOWN.
        """
        cdef Py_ssize_t n = ids.shape[0], i, first
        cdef double* scores
        cdef int64_t found = UNKNOWN
        if logits.shape[0] != n or not 0 < n <= self.count or self.words.shape[0] != 2 * self.count:
            raise ValueError(f"ids, logits: expected 1 to {self.words.shape[0] // 2}, got {n} and {logits.shape[0]}")
        for i in range(n):
            if not 0 <= ids[i] < self.count:
                raise ValueError(f"ids: expected 0 to {self.count - 1}, got {ids[i]}")
        n = count_kept(&logits[0], n, top_k, self.count)
        if n < 1 or not temperature > 0 or not isfinite(logits[0]) or not isfinite(logits[n - 1]):
            return UNKNOWN
        scores = <double*>resized(NULL, 2 * n * sizeof(double))
        with nogil:
            first = self.draw_among(&ids[0], &logits[0], n, temperature, top_p, min_p, scores, scores + n)
            if first >= 0:
                found = ids[first]
        free(scores)
        return found

    cdef Py_ssize_t draw_among(
        self, const token_t* ids, const float* logits, Py_ssize_t n, double temperature, double top_p, double min_p,
        double* scores, double* depths,
    ) noexcept nogil:
        """The place of the one that is drawn, −1: rounding may decide; there is room for n numbers twice."""
        cdef Py_ssize_t i, first, kept
        cdef double best, second
        cdef const uint32_t* pair
        for i in range(n):
            pair = self.first + 2 * ids[i]
            depths[i] = (<double>logits[0] - logits[i]) / temperature
            scores[i] = gain_of(tempered(pair[0]), tempered(pair[1])) - depths[i]
        while True:
            first, best, second = -1, -INFINITY, -INFINITY
            for i in range(n):
                if scores[i] > best:
                    first, second, best = i, best, scores[i]
                elif scores[i] > second:
                    second = scores[i]
            if first < 0 or best - second < LEAD or depths[first] > DEPTH:
                return -1
            kept = is_kept(depths, n, first, top_p, min_p)
            if kept:
                return first if kept > 0 else -1
            scores[first] = -INFINITY

    cdef int check(self, const float[::1] given) except -1:
        if given.shape[0] != self.count or self.words.shape[0] != 2 * self.count:
            raise ValueError(f"expected {self.words.shape[0] // 2} numbers, got {given.shape[0]}")
        return 0


def skipped(const unsigned char[::1] state, int64_t count):
    """The state behind so many exponentially distributed numbers, uint8 [n]; raises as `Numbers.begin` does."""
    cdef uint32_t[2 * WORDS] words
    cdef Py_ssize_t given = read(state, words)
    cdef int64_t left = 2 * count
    with nogil:
        while left > WORDS - given:
            left -= WORDS - given
            twist(&words[WORDS], WORDS - SHIFT)
            twist(&words[2 * WORDS - SHIFT], SHIFT)
            memcpy(words, &words[WORDS], WORDS * sizeof(uint32_t))
            given = 0
        given += left
    return written(state, words, given)
