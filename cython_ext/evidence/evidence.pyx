"""Kernels of calibration: which proposed nodes a text has judged, and counts by evidence class."""

import numpy as np

from libc.stdlib cimport free, malloc

from common.types cimport int32_t, token_t


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


def calibrated(
    const int32_t[::1] parents,
    const float[::1] probs,
    const int32_t[::1] classes,
    const float[::1] known,
    const double[:, ::1] counts,
):
    """Rates of a tree's nodes, given their parents, and the probabilities that follow from them.

    A class has the rate of its hits among its trials, `counts` [classes, 2] being trials and hits. A
    node of a negative class has the rate that `probs` give it. `known` [n] are probabilities that
    stand, −1 where there is none: there the class is one of the second half of the counts. None: all
    classes are as they are.

    Returns rates float64 [n], probabilities float32 [n], and the classes int32 [n] that are counted.
    """
    cdef Py_ssize_t n = parents.shape[0], i, c, limit = counts.shape[0]
    cdef double above
    rates_out, probs_out = np.empty(n, dtype=np.float64), np.empty(n, dtype=np.float32)
    counted_out = np.empty(n, dtype=np.int32)
    cdef double[::1] rate = rates_out
    cdef float[::1] prob = probs_out
    cdef int32_t[::1] counted = counted_out
    if known is not None:
        if known.shape[0] != n:
            raise ValueError(f"known: expected {n} nodes, got {known.shape[0]}")
        limit //= 2
    for i in range(n):
        c = checked(classes[i], limit)
        if c >= 0 and known is not None and known[i] < 0:
            c += limit
        counted[i] = <int32_t>c
        if c >= 0:
            rate[i] = counts[c, 1] / counts[c, 0]
        else:
            above = 1 if parents[i] < 0 else probs[parents[i]]
            rate[i] = probs[i] / above if above > 0 else 0
        prob[i] = <float>rate[i] if parents[i] < 0 else <float>rate[i] * prob[parents[i]]
        if known is not None and known[i] >= 0:
            prob[i] = known[i]
    return rates_out, probs_out, counted_out


cdef struct Trial:
    int32_t kind
    double rate
    unsigned char hit


cdef Trial* put_to_test(
    const token_t[::1] token_ids,
    const int32_t[::1] parents,
    const int32_t[::1] classes,
    const double[::1] rates,
    const token_t[::1] tokens,
    Py_ssize_t known,
    Py_ssize_t* trials,
    bint* inside,
) except NULL:
    """The nodes whose parent lies on the text's path, in their order, for the caller to free; how many
    they are, and whether the path goes through the tree to its last token. See `judge`."""
    cdef Py_ssize_t n = parents.shape[0], i, m = 0, reached = 0
    cdef int32_t position
    cdef Trial* found = <Trial*>malloc((n + 1) * (sizeof(Trial) + sizeof(int32_t)))
    if found == NULL:
        raise MemoryError()
    # Position in `tokens` of the token that follows a node on the path; −1 off the path.
    cdef int32_t* after = <int32_t*>(found + n + 1)
    for i in range(n):
        position = 0 if parents[i] < 0 else after[parents[i]]
        after[i] = -1
        if position < 0 or position >= tokens.shape[0]:
            continue
        if token_ids[i] == tokens[position]:
            after[i] = position + 1
            reached = max(reached, position + 1)
        if position >= known:
            found[m] = Trial(classes[i], rates[i], after[i] >= 0)
            m += 1
    trials[0], inside[0] = m, reached == tokens.shape[0]
    return found


cdef inline void count(double* cell, double hit, const double* prior, double memory) noexcept nogil:
    """Add a trial to the trials and hits of a class.

    A class with more than `memory` trials forgets half of what was counted beyond `prior`.
    """
    cell[0] += 1
    cell[1] += hit
    if cell[0] > memory:
        cell[0] = 0.5 * (cell[0] + prior[0])
        cell[1] = 0.5 * (cell[1] + prior[1])


def judge(
    const token_t[::1] token_ids,
    const int32_t[::1] parents,
    const int32_t[::1] classes,
    const double[::1] rates,
    const token_t[::1] tokens,
    Py_ssize_t known,
    double[:, ::1] bins,
    double[:, ::1] counts,
    const double[:, ::1] priors,
    double memory,
):
    """Count what a text says of the nodes of a tree that it put to the test: those whose parent lies on
    its path, which are hit where they are on the path as well.

    `tokens` are the ones that followed the proposal; the nodes judged by the first `known` of them are
    left out. Their predicted `rates` [n] and hits are added to `bins` [k, 3] (trials, predicted and
    observed hits) by predicted rate, in k equal steps. Those with a class are counted in the trials
    and hits `counts`, on top of the `priors`, [classes, 2] each, where a class with more trials than
    the memory forgets half of what lies beyond the prior.

    Returns whether the path goes through the tree to its last token. O(n).
    """
    cdef Py_ssize_t m, i, k = bins.shape[0], b
    cdef bint inside
    cdef Trial* trials
    if counts.shape[0] > priors.shape[0]:
        raise ValueError(f"priors: expected {counts.shape[0]} classes, got {priors.shape[0]}")
    for i in range(classes.shape[0]):
        checked(classes[i], counts.shape[0])
    trials = put_to_test(token_ids, parents, classes, rates, tokens, known, &m, &inside)
    for i in range(m):
        b = min(<Py_ssize_t>(trials[i].rate * k), k - 1)
        bins[b, 0] += 1
        bins[b, 1] += trials[i].rate
        bins[b, 2] += trials[i].hit
        if trials[i].kind >= 0:
            b = trials[i].kind
            count(&counts[b, 0], trials[i].hit, &priors[b, 0], memory)
    free(trials)
    return inside
