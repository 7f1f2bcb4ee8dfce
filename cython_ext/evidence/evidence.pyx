"""Kernels of calibration: which proposed nodes a text has judged, and counts by evidence class."""

import numpy as np

from libc.stdlib cimport free
from libc.string cimport memcpy

from common.blocks cimport resized
from common.checks cimport check_offsets
from common.types cimport int32_t, int64_t, token_t


cdef enum:
    MOST_OPEN = 4  # proposals for a text that later tokens may still judge


cdef struct OpenDraft:
    int32_t size
    int32_t here        # the node that the text has reached; −1: the root
    Py_ssize_t classes_known
    token_t* token_ids  # [size] each, in one block
    int32_t* parents
    int32_t* classes


cdef class OpenDrafts:
    """The latest proposals for one text that it has not left yet, at most four. One thread at a time."""

    cdef OpenDraft drafts[MOST_OPEN]
    cdef int32_t count

    def __len__(self):
        return self.count

    cdef OpenDraft* open(self, Py_ssize_t n) except NULL:
        """Room for a proposal of n nodes; the oldest one gives way."""
        cdef OpenDraft* draft
        if self.count == MOST_OPEN:
            self.close(0)
        draft = &self.drafts[self.count]
        draft.token_ids = <token_t*>resized(NULL, 3 * n * sizeof(int32_t))
        draft.parents = <int32_t*>(draft.token_ids + n)
        draft.classes = draft.parents + n
        draft.size, draft.here = <int32_t>n, -1
        self.count += 1
        return draft

    cdef void close(self, int32_t number) noexcept:
        """Forget a proposal."""
        free(self.drafts[number].token_ids)
        self.count -= 1
        for number in range(number, self.count):
            self.drafts[number] = self.drafts[number + 1]

    def __dealloc__(self):
        while self.count:
            self.close(self.count - 1)


cdef void calibrate(
    const OpenDraft* draft, const float* probs, const double[:, ::1] counts, float* out
) noexcept nogil:
    """The probabilities `out` that follow from rates of a proposal's nodes, given their parents."""
    cdef int32_t i, c, parent
    cdef float rate, above
    for i in range(draft.size):
        c, parent = draft.classes[i], draft.parents[i]
        if c >= 0:
            rate = <float>(counts[c, 1] / counts[c, 0])
        else:
            above = 1 if parent < 0 else probs[parent]
            rate = probs[i] / above if above > 0 else 0
        out[i] = rate if parent < 0 else rate * out[parent]


def calibrated(
    list texts, const token_t[::1] token_ids, const int32_t[::1] parents, const float[::1] probs,
    const int32_t[::1] classes, const int64_t[::1] offsets, const double[:, ::1] counts,
):
    """Probabilities of the nodes of one tree for each text, which is open from now on.

    A class has the rate of its hits among its trials, `counts` [classes, 2] being trials and hits. A
    node of a negative class has the rate that `probs` give it.

    Args:
        texts: `OpenDrafts` of each text.
        token_ids, parents, probs, classes: [n], of all trees, one behind another, as a forest has them.
        offsets: int64 [texts + 1], where each tree begins.

    Returns float32 [n]. Raises ValueError, and opens nothing, for a class that is not counted.
    """
    cdef Py_ssize_t n = token_ids.shape[0], limit = counts.shape[0], row, i, first, size
    cdef OpenDraft* draft
    out = np.empty(n, dtype=np.float32)
    cdef float[::1] prob = out
    if not parents.shape[0] == probs.shape[0] == classes.shape[0] == n:
        raise ValueError(f"parents, probs, classes: expected {n} nodes each")
    check_offsets(offsets, len(texts), n)
    for i in range(n):
        if classes[i] >= limit:
            raise ValueError(f"expected evidence classes below {limit}, got {classes[i]}")
    for row in range(len(texts)):
        first = offsets[row]
        size = offsets[row + 1] - first
        if not size:
            continue
        draft = (<OpenDrafts?>texts[row]).open(size)
        draft.classes_known = counts.shape[0]
        memcpy(draft.token_ids, &token_ids[first], size * sizeof(token_t))
        memcpy(draft.parents, &parents[first], size * sizeof(int32_t))
        memcpy(draft.classes, &classes[first], size * sizeof(int32_t))
        calibrate(draft, &probs[first], counts, &prob[first])
    return out


cdef inline void count(double* cell, double hit, const double* prior, double memory) noexcept nogil:
    """Add a trial to the trials and hits of a class.

    A class with more than `memory` trials forgets half of what was counted beyond `prior`.
    """
    cell[0] += 1
    cell[1] += hit
    if cell[0] > memory:
        cell[0] = 0.5 * (cell[0] + prior[0])
        cell[1] = 0.5 * (cell[1] + prior[1])


cdef bint judge_draft(
    OpenDraft* draft, const token_t* tokens, int32_t m, int32_t* after,
    double[:, ::1] counts, const double[:, ::1] priors, double memory,
) noexcept nogil:
    """Count what m more tokens say of a proposal; whether the text is still inside of it.

    `after` is room for the number of tokens on the text's path to each node, −1 off the path.
    """
    cdef int32_t i, c, parent, reached = draft.here, done
    for i in range(draft.here + 1):
        after[i] = -1
    if draft.here >= 0:
        after[draft.here] = 0
    for i in range(draft.here + 1, draft.size):
        parent = draft.parents[i]
        done = after[parent] if parent >= 0 else (0 if draft.here < 0 else -1)
        after[i] = -1
        if not 0 <= done < m:
            continue
        if draft.token_ids[i] == tokens[done]:
            after[i] = done + 1
            reached = i
        c = draft.classes[i]
        if c >= 0:
            count(&counts[c, 0], after[i] >= 0, &priors[c, 0], memory)
    draft.here = reached
    return m == 0 or (reached >= 0 and after[reached] == m)


def judge(
    list texts, const token_t[::1] tokens, const int64_t[::1] offsets, double[:, ::1] counts,
    const double[:, ::1] priors, double memory,
):
    """Count what texts say of the nodes that they put to the test: those of open proposals whose parent
    lies on the text's path, which are hit where they are on the path as well.

    Those with a class are counted in the trials and hits `counts`, on top of the `priors`, [classes, 2]
    each, where a class with more trials than the memory forgets half of what lies beyond the prior. A
    proposal that its text has left is open no more.

    Args:
        texts: `OpenDrafts` of each text.
        tokens: by which the texts went on, one text's behind another's.
        offsets: int64 [texts + 1], where each text's begin.
    """
    cdef OpenDrafts text
    cdef OpenDraft* draft
    cdef int32_t* after = NULL
    cdef const token_t* first = &tokens[0] if tokens.shape[0] else NULL
    cdef Py_ssize_t row, room = 0
    cdef int32_t i, m
    if counts.shape[0] > priors.shape[0]:
        raise ValueError(f"priors: expected {counts.shape[0]} classes, got {priors.shape[0]}")
    check_offsets(offsets, len(texts), tokens.shape[0])
    try:
        for row in range(len(texts)):
            text, m, i = texts[row], <int32_t>(offsets[row + 1] - offsets[row]), 0
            while i < text.count:
                draft = &text.drafts[i]
                if draft.classes_known > counts.shape[0]:
                    raise ValueError(
                        f"counts: expected {draft.classes_known} classes, got {counts.shape[0]}"
                    )
                if draft.size > room:
                    after = <int32_t*>resized(after, draft.size * sizeof(int32_t))
                    room = draft.size
                if judge_draft(draft, first + offsets[row], m, after, counts, priors, memory):
                    i += 1
                else:
                    text.close(i)
    finally:
        free(after)
