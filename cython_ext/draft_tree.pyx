"""Operations on token trees given as parent arrays: free functions over flat int32 arrays."""

import numpy as np

from types cimport int32_t, token_t


def depths(const int32_t[::1] parents):
    """Depth of every node, children of the root being at depth 1. Returns int32 [n]. O(n)."""
    cdef Py_ssize_t n = parents.shape[0], i
    out = np.empty(n, dtype=np.int32)
    cdef int32_t[::1] depth = out
    with nogil:
        for i in range(n):
            depth[i] = 1 if parents[i] < 0 else depth[parents[i]] + 1
    return out


def ancestor_mask(const int32_t[::1] parents):
    """`mask[i, j]` is True where node j is node i or an ancestor of it. Returns bool [n, n]. O(n²)."""
    cdef Py_ssize_t n = parents.shape[0], i, j
    cdef int32_t p
    out = np.zeros((n, n), dtype=np.bool_)
    cdef unsigned char[:, ::1] mask = out.view(np.uint8)
    with nogil:
        for i in range(n):
            p = parents[i]
            if p >= 0:
                for j in range(p + 1):
                    mask[i, j] = mask[p, j]
            mask[i, i] = 1
    return out


def path_products(const int32_t[::1] parents, const float[::1] rates):
    """Product of `rates` from the root's child down to each node. Returns float32 [n]. O(n)."""
    cdef Py_ssize_t n = parents.shape[0], i
    out = np.empty(n, dtype=np.float32)
    cdef float[::1] product = out
    with nogil:
        for i in range(n):
            product[i] = rates[i] if parents[i] < 0 else rates[i] * product[parents[i]]
    return out


def follow(const token_t[::1] token_ids, const int32_t[::1] parents, const int32_t[::1] tokens):
    """Nodes met when walking `tokens` down from the root, until no child matches.

    Returns int32 [length of the matched path]. O(n), since children follow their parents.
    """
    cdef Py_ssize_t n = parents.shape[0], m = tokens.shape[0], i, length = 0
    cdef int32_t here = -1
    out = np.empty(min(n, m), dtype=np.int32)
    cdef int32_t[::1] path = out
    with nogil:
        for i in range(n):
            if length == m:
                break
            if parents[i] == here and token_ids[i] == tokens[length]:
                path[length] = <int32_t>i
                length += 1
                here = <int32_t>i
    return out[:length]


def child_with(const token_t[::1] token_ids, const int32_t[::1] parents, int32_t parent, token_t token):
    """The child of `parent` (−1: the root) that carries `token`, or −1. O(n)."""
    cdef Py_ssize_t n = parents.shape[0], i
    for i in range(parent + 1, n):
        if parents[i] == parent and token_ids[i] == token:
            return i
    return -1


def graft(
    const token_t[::1] base_tokens,
    const int32_t[::1] base_parents,
    const token_t[::1] added_tokens,
    const int32_t[::1] added_parents,
):
    """Lay a second tree over a first one; paths with equal tokens become one.

    Returns int32 [n_added]: for each added node its index in the union, whose first nodes are the
    base's and whose further nodes are the added ones that were new, in order. O(n_base x n_added) at
    worst, and about n_added times the fan-out on trees whose levels stand together.
    """
    cdef Py_ssize_t n = base_tokens.shape[0], m = added_tokens.shape[0], i, j
    cdef int32_t parent, next_new = <int32_t>n
    out = np.empty(m, dtype=np.int32)
    cdef int32_t[::1] place = out
    with nogil:
        for i in range(m):
            parent = -1 if added_parents[i] < 0 else place[added_parents[i]]
            place[i] = -1
            if parent < n:
                for j in range(parent + 1, n):
                    if base_parents[j] == parent and base_tokens[j] == added_tokens[i]:
                        place[i] = <int32_t>j
                        break
            if place[i] < 0:
                place[i] = next_new
                next_new += 1
    return out
