"""Kernels of calibration: which proposed nodes a text has judged, and counts by evidence class."""

import numpy as np

from common.types cimport int32_t, token_t


def tried(
    const token_t[::1] token_ids,
    const int32_t[::1] parents,
    const int32_t[::1] classes,
    const double[::1] rates,
    const token_t[::1] tokens,
    Py_ssize_t known=0,
):
    """What a text says of the nodes of a tree that it put to the test: those whose parent lies on its
    path.

    `tokens` are the ones that followed the proposal; the nodes judged by the first `known` of them are
    left out. Returns, in the nodes' order, int32 [m] their classes, float64 [m] their rates and bool
    [m], which of them are on the path as well; and whether the path goes through the tree to its last
    token. O(n).
    """
    cdef Py_ssize_t n = parents.shape[0], i, m = 0, reached = 0
    cdef int32_t position
    classes_out, rates_out = np.empty(n, dtype=np.int32), np.empty(n, dtype=np.float64)
    hits_out, after_out = np.empty(n, dtype=np.bool_), np.empty(n, dtype=np.int32)
    cdef int32_t[::1] tried_classes = classes_out
    cdef double[::1] tried_rates = rates_out
    cdef unsigned char[::1] hits = hits_out.view(np.uint8)
    # Position in `tokens` of the token that follows a node on the path; −1 off the path.
    cdef int32_t[::1] after = after_out
    with nogil:
        for i in range(n):
            position = 0 if parents[i] < 0 else after[parents[i]]
            after[i] = -1
            if position < 0 or position >= tokens.shape[0]:
                continue
            if token_ids[i] == tokens[position]:
                after[i] = position + 1
                reached = max(reached, position + 1)
            if position >= known:
                tried_classes[m], tried_rates[m] = classes[i], rates[i]
                hits[m] = after[i] >= 0
                m += 1
    return classes_out[:m], rates_out[:m], hits_out[:m], reached == tokens.shape[0]


def share_classes(
    const int32_t[::1] parents,
    const float[::1] shares,
    const int32_t[::1] counts,
    int matched,
    const int32_t[::1] rows,
    const int32_t[::1] columns,
):
    """Classes (int32 [n]) of counted nodes: by the tokens matched up to their parent, one row each,
    and by the share of its occurrences that go on with them.

    `rows` buckets numbers of tokens, of which `matched` are matched at the root; the last entry is
    for all that are larger. `columns` buckets shares in equal steps from 0 to 1; its last entry is
    for a parent that occurred once.
    """
    cdef Py_ssize_t n = parents.shape[0], i, longest = rows.shape[0] - 1
    cdef Py_ssize_t steps = columns.shape[0] - 2, step
    cdef int32_t width = columns[steps + 1] + 1
    lengths_out, classes_out = np.empty((2, n), dtype=np.int32)
    cdef int32_t[::1] lengths = lengths_out, classes = classes_out
    with nogil:
        for i in range(n):
            lengths[i] = matched if parents[i] < 0 else lengths[parents[i]] + 1
            step = <Py_ssize_t>(shares[i] * <float>steps)
            if shares[i] == 1 and counts[i] == 1:
                step += 1
            classes[i] = rows[min(<Py_ssize_t>lengths[i], longest)] * width + columns[step]
    return classes_out


cdef inline Py_ssize_t checked(int32_t evidence_class, Py_ssize_t classes) except -2:
    """The class as an index, −1 for none."""
    if evidence_class >= classes:
        raise ValueError(f"expected evidence classes below {classes}, got {evidence_class}")
    return evidence_class if evidence_class >= 0 else -1


def count(
    const int32_t[::1] classes,
    const unsigned char[::1] hits,
    double[:, ::1] counts,
    const double[:, ::1] prior_counts,
    double memory,
):
    """Add trials and hits by class to `counts` [classes, 2]; negative classes are passed over.

    A class with more than `memory` trials forgets half of what was counted beyond `prior_counts`.
    """
    cdef Py_ssize_t i, c
    for i in range(classes.shape[0]):
        c = checked(classes[i], counts.shape[0])
        if c < 0:
            continue
        counts[c, 0] += 1
        counts[c, 1] += hits[i]
        if counts[c, 0] > memory:
            counts[c, 0] = 0.5 * (counts[c, 0] + prior_counts[c, 0])
            counts[c, 1] = 0.5 * (counts[c, 1] + prior_counts[c, 1])


cdef inline double posterior(
    Py_ssize_t c, const double[:, ::1] shared, const double[:, ::1] own, double odds_factor,
    double strength,
) noexcept nogil:
    """Mean rate of a class from its `own` counts on a prior from the `shared` ones.

    The prior is the shared rate with its odds times `odds_factor`, worth `strength` trials.
    """
    cdef double prior = shared[c, 1] / shared[c, 0]
    prior = prior * odds_factor / (1 + (odds_factor - 1) * prior)
    return (strength * prior + own[c, 1]) / (strength + own[c, 0])


def rates(
    const int32_t[::1] classes,
    const double[:, ::1] shared,
    const double[:, ::1] own,
    double odds_factor,
    double strength,
):
    """Posterior mean rates, float64 [n]; see `posterior`. 0 for a negative class."""
    cdef Py_ssize_t n = classes.shape[0], i, c
    out = np.zeros(n, dtype=np.float64)
    cdef double[::1] rate = out
    for i in range(n):
        c = checked(classes[i], min(shared.shape[0], own.shape[0]))
        if c >= 0:
            rate[i] = posterior(c, shared, own, odds_factor, strength)
    return out


def calibrated(
    const int32_t[::1] parents,
    const float[::1] probs,
    const int32_t[::1] classes,
    const double[:, ::1] shared,
    const double[:, ::1] own,
    double odds_factor,
    double strength,
):
    """Rates of a tree's nodes, given their parents, and the probabilities that follow from them.

    A node of a negative class keeps the rate that `probs` give it. Returns float64 [n], float32 [n],
    and whether any node has a class.
    """
    cdef Py_ssize_t n = parents.shape[0], i, c
    cdef double above
    cdef bint named = False
    rates_out, probs_out = np.empty(n, dtype=np.float64), np.empty(n, dtype=np.float32)
    cdef double[::1] rate = rates_out
    cdef float[::1] prob = probs_out
    for i in range(n):
        c = checked(classes[i], min(shared.shape[0], own.shape[0]))
        if c >= 0:
            named = True
            rate[i] = posterior(c, shared, own, odds_factor, strength)
        else:
            above = 1 if parents[i] < 0 else probs[parents[i]]
            rate[i] = probs[i] / above if above > 0 else 0
        prob[i] = <float>rate[i] if parents[i] < 0 else <float>rate[i] * prob[parents[i]]
    return rates_out, probs_out, named


def follow_trend(
    const int32_t[::1] classes,
    const unsigned char[::1] hits,
    const double[:, ::1] shared,
    double[::1] sums,
    double memory,
):
    """Add to `sums` [4] the hits and misses seen, and those due by the rates of the `shared` counts.

    All are halved once more than `memory` trials are in them.
    """
    cdef Py_ssize_t i, c
    cdef double rate
    for i in range(classes.shape[0]):
        c = checked(classes[i], shared.shape[0])
        if c < 0:
            continue
        rate = shared[c, 1] / shared[c, 0]
        sums[0] += hits[i]
        sums[1] += 1 - hits[i]
        sums[2] += rate
        sums[3] += 1 - rate
    if sums[0] + sums[1] > memory:
        for i in range(4):
            sums[i] *= 0.5


def score(const double[::1] predicted, const unsigned char[::1] hits, double[:, ::1] bins):
    """Add trials, predicted and observed hits to `bins` [k, 3] by predicted rate, in k equal steps."""
    cdef Py_ssize_t k = bins.shape[0], i, b
    for i in range(predicted.shape[0]):
        b = min(<Py_ssize_t>(predicted[i] * k), k - 1)
        bins[b, 0] += 1
        bins[b, 1] += predicted[i]
        bins[b, 2] += hits[i]
