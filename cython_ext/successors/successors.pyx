"""Drafts from a table of successors: for every token those that are likely to follow it, best first."""

import numpy as np

from libc.stdlib cimport free

from common.ranking cimport Ranked, ranking
from common.types cimport int32_t, token_t, uint8_t


def draft(
    const token_t[:, ::1] successors,
    const uint8_t[:, ::1] kinds,
    token_t root,
    const int32_t[::1] parents,
    const int32_t[::1] ranks,
    const float[::1] rates,
    Py_ssize_t budget,
    int32_t first_kind=-1,
    token_t left_out=-1,
):
    """A template laid over the table below the token `root`, without what is unknown.

    Template node "rank r below p" stands for the r-th successor of p's token; `parents` come first. A
    negative successor is unknown, and so is all below it, and below a root beyond the table's rows.

    Args:
        successors, kinds: int32 and uint8 [tokens, k], the table and the evidence of each entry.
        parents, ranks: int32 [n], the template; ranks below k.
        rates: float32 [kinds], probability that a successor is right, given that its parent is.
        budget: nodes at most, the most probable ones; of equal ones the first.
        first_kind: evidence of the root's first child, the r-th child having that and r; −1: the
            table's.
        left_out: a token that is no child of the root; −1: there is none.

    Returns int32 token ids, int32 parents, float32 probs, int32 evidence, each [nodes]. O(n log n).
    """
    cdef Py_ssize_t n = parents.shape[0], rows = successors.shape[0], i, known = 0, kept = 0
    cdef Ranked* ranked
    cdef token_t above, token
    cdef int32_t parent, kind
    cdef float prob
    tokens_out, parents_out = np.empty(n, np.int32), np.empty(n, np.int32)
    probs_out, kinds_out = np.empty(n, np.float32), np.empty(n, np.int32)
    place_out = np.empty(n, np.int32)  # of each template node in the draft; −1: unknown
    cdef token_t[::1] tokens = tokens_out
    cdef int32_t[::1] places = place_out, above_out = parents_out, evidence = kinds_out
    cdef float[::1] probs = probs_out
    if root < 0 or root >= rows:
        n = 0
    for i in range(n):
        places[i] = -1
        parent = -1
        above, prob = root, 1
        if parents[i] >= 0:
            parent = places[parents[i]]
            if parent < 0:
                continue
            above, prob = tokens[parent], probs[parent]
        if not (0 <= ranks[i] < successors.shape[1]) or above >= rows:
            continue
        token, kind = successors[above, ranks[i]], kinds[above, ranks[i]]
        if token < 0 or (parent < 0 and token == left_out):
            continue
        if parent < 0 and first_kind >= 0:
            kind = first_kind + ranks[i]
        if kind >= rates.shape[0]:
            raise ValueError(f"kinds: expected below {rates.shape[0]}, got {kind}")
        tokens[known], above_out[known] = token, parent
        probs[known], evidence[known] = prob * rates[kind], kind
        places[i] = <int32_t>known
        known += 1
    if budget < known:
        ranked = ranking(probs[:known])
        for i in range(known):
            places[ranked[i].node] = 0 if i < budget else -1
        free(ranked)
        for i in range(known):
            if places[i] < 0:
                continue
            parent = above_out[i]
            tokens[kept], probs[kept], evidence[kept] = tokens[i], probs[i], evidence[i]
            above_out[kept] = places[parent] if parent >= 0 else -1
            places[i] = <int32_t>kept
            kept += 1
        known = kept
    return tokens_out[:known], parents_out[:known], probs_out[:known], kinds_out[:known]
