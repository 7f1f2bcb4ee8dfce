# Nodes by their probability: the likeliest of trees, and what steps over several bring.

cdef struct Ranked:
    float prob
    int32_t node


cdef int by_probability(const void* a, const void* b) noexcept nogil:
    """Higher probability first; of equal ones the earlier node, which is no descendant."""
    cdef const Ranked* x = <const Ranked*>a
    cdef const Ranked* y = <const Ranked*>b
    if x.prob != y.prob:
        return -1 if x.prob > y.prob else 1
    return -1 if x.node < y.node else 1


cdef Ranked* ranking(const float* probs, Py_ssize_t n) except NULL:
    """The n nodes by falling probability, for the caller to free."""
    cdef Py_ssize_t i
    cdef Ranked* ranked = <Ranked*>resized(NULL, n * sizeof(Ranked))
    for i in range(n):
        ranked[i] = Ranked(probs[i], <int32_t>i)
    qsort(ranked, n, sizeof(Ranked), by_probability)
    return ranked


def prune(
    const token_t[::1] token_ids,
    const int32_t[::1] parents,
    const float[::1] probs,
    const int32_t[::1] classes,
    const int64_t[::1] offsets,
    const int64_t[::1] budgets,
):
    """Of each of several trees its `budgets` most probable nodes, in their order.

    One tree's nodes stand behind another's in the arrays; `offsets`, int64 [trees + 1], tells where each
    tree begins. Returns four arrays and offsets. O(n log n).
    """
    cdef Py_ssize_t trees = budgets.shape[0], tree, i, kept = 0
    check_offsets(offsets, trees, token_ids.shape[0])
    cdef _Nodes out = _Nodes(token_ids.shape[0])
    ends_out = np.zeros(trees + 1, np.int64)
    cdef int64_t[::1] ends = ends_out
    cdef int32_t* place = <int32_t*>resized(NULL, token_ids.shape[0] * sizeof(int32_t))
    try:
        for tree in range(trees):
            choose_likeliest(probs, offsets[tree], offsets[tree + 1], budgets[tree], place)
            for i in range(offsets[tree], offsets[tree + 1]):
                if place[i] < 0:
                    continue
                place[i] = <int32_t>(kept - ends[tree])
                out.put(
                    kept,
                    token_ids[i],
                    place[offsets[tree] + parents[i]] if parents[i] >= 0 else -1,
                    probs[i],
                    classes[i],
                )
                kept += 1
            ends[tree + 1] = kept
    finally:
        free(place)
    return *out.arrays(kept), ends_out


cdef int choose_likeliest(
    const float[::1] probs, Py_ssize_t first, Py_ssize_t end, int64_t budget, int32_t* place
) except -1:
    """Set `place` of the nodes from `first` to `end` to 0 for the `budget` most probable ones, else −1."""
    cdef Py_ssize_t i
    cdef Ranked* ranked
    for i in range(first, end):
        place[i] = 0 if budget >= end - first else -1
    if 0 < budget < end - first:
        ranked = ranking(&probs[first], end - first)
        for i in range(budget):
            place[first + ranked[i].node] = 0
        free(ranked)
    return 0


def by_width(const float[::1] probs, const int64_t[::1] offsets):
    """Tokens that a step over several trees brings, all of them together, when each verifies its 0, 1,
    ... most probable nodes: float64 [nodes of the largest + 1].

    `probs` and `offsets` as for `rank`. O(n log n).
    """
    cdef Py_ssize_t trees = offsets.shape[0] - 1, tree, i, widest = 0
    cdef Ranked* ranked
    check_offsets(offsets, trees, probs.shape[0])
    for tree in range(trees):
        widest = max(widest, offsets[tree + 1] - offsets[tree])
    tokens_out = np.zeros(widest + 1)
    cdef double[::1] tokens = tokens_out
    tokens[0] = trees
    for tree in range(trees):
        if offsets[tree + 1] > offsets[tree]:
            ranked = ranking(&probs[offsets[tree]], offsets[tree + 1] - offsets[tree])
            for i in range(offsets[tree + 1] - offsets[tree]):
                tokens[i + 1] += ranked[i].prob
            free(ranked)
    for i in range(widest):
        tokens[i + 1] += tokens[i]
    return tokens_out


def rank(const float[::1] probs, const int64_t[::1] offsets):
    """The nodes of several trees, the most probable first.

    `probs` are the trees', float32 [n], one tree's behind another's, `offsets`, int64 [trees + 1], where
    each begins. Of equal nodes the earlier tree's come first. Returns the tree of each node, int32 [n],
    and float64 [n + 1]: the tokens that a step over all trees brings when the first 0, 1, ..., n nodes
    are verified. O(n log n).
    """
    cdef Py_ssize_t n = probs.shape[0], i, count = offsets.shape[0] - 1
    cdef int32_t tree
    owners_out, trees_out = np.empty((2, n), dtype=np.int32)
    tokens_out = np.empty(n + 1, dtype=np.float64)
    cdef int32_t[::1] owners = owners_out, trees = trees_out
    cdef double[::1] tokens = tokens_out
    cdef Ranked* ranked
    check_offsets(offsets, count, n)
    for tree in range(count):
        for i in range(offsets[tree], offsets[tree + 1]):
            owners[i] = tree
    ranked = ranking(&probs[0] if n else NULL, n)
    tokens[0] = count
    for i in range(n):
        trees[i] = owners[ranked[i].node]
        tokens[i + 1] = tokens[i] + ranked[i].prob
    free(ranked)
    return trees_out, tokens_out
