"""Operations on token trees given as parent arrays: free functions over flat int32 arrays."""

import numpy as np

from libc.stdlib cimport free
from libc.string cimport memcpy, memset

from common.blocks cimport resized
from common.checks cimport check_offsets
from common.sort cimport key_value, sort, sort_key
from common.types cimport int32_t, int64_t, token_t

# A token tree's arrays: ids, parents, probabilities, classes.
TREE_DTYPES = tuple(np.dtype(name) for name in ("int32", "int32", "float32", "int32"))


def flattened(texts):
    """The tokens of several texts, sequences of ids, one text's behind another's.

    Returns int32 [n], and int64 [texts + 1], where each text's begin.
    """
    cdef Py_ssize_t count = len(texts), row, i = 0
    offsets_out = np.zeros(count + 1, dtype=np.int64)
    cdef int64_t[::1] offsets = offsets_out
    for row in range(count):
        offsets[row + 1] = offsets[row] + len(texts[row])
    ids_out = np.empty(offsets[count], dtype=np.int32)
    cdef token_t[::1] ids = ids_out
    for text in texts:
        for token in text:
            ids[i] = token
            i += 1
    return ids_out, offsets_out


def depths(const int32_t[::1] parents):
    """Depth of every node, children of the root being at depth 1. Returns int32 [n]. O(n)."""
    cdef Py_ssize_t n = parents.shape[0], i
    out = np.empty(n, dtype=np.int32)
    cdef int32_t[::1] depth = out
    with nogil:
        for i in range(n):
            depth[i] = 1 if parents[i] < 0 else depth[parents[i]] + 1
    return out


def arrange(
    roots, lengths, const int64_t[::1] offsets, const token_t[::1] token_ids,
    const int32_t[::1] parents, rows, Py_ssize_t width,
):
    """Trees side by side, each behind its root and filled up to one width.

    `roots` and `lengths`, a number of each text; `token_ids` and `parents` those of the trees, one behind
    another's, `offsets` where each begins; `rows` which texts have a line, ascending, None: all. Width 0:
    that of the widest of these. Filler repeats the root's token and sees the root alone, and nobody sees
    it.

    Returns int64 [b]: the rows, the tokens of each without filler, and their lengths; int64 [b, width]
    token ids, int64 [b, width] depths, the root's being 0, and bool [b, width, width], who sees whom: a
    node itself, its ancestors and the root. O(b width²).
    """
    cdef Py_ssize_t b = len(roots) if rows is None else len(rows), line, row, first, count, i, j, above
    cdef int64_t root
    check_offsets(offsets, len(roots), parents.shape[0])
    numbers_out = np.empty((3, b), np.int64)
    cdef int64_t[:, ::1] numbers = numbers_out
    cdef Py_ssize_t widest = 1
    for line in range(b):
        row = line if rows is None else rows[line]
        if not 0 <= row < offsets.shape[0] - 1:
            raise ValueError(f"rows: expected 0 to {offsets.shape[0] - 2}, got {row}")
        numbers[0, line], numbers[2, line] = row, lengths[row]
        numbers[1, line] = 1 + offsets[row + 1] - offsets[row]
        widest = max(widest, numbers[1, line])
    if width and width < widest:
        raise ValueError(f"width: expected at least {widest}, got {width}")
    width = width or widest
    lines_out = np.empty((2, b, width), np.int64)
    sees_out = np.zeros((b, width, width), np.uint8)
    cdef int64_t[:, :, ::1] lines = lines_out
    cdef unsigned char[:, :, ::1] sees = sees_out
    for line in range(b):
        row, count = numbers[0, line], numbers[1, line]
        root, first = roots[row], offsets[row]
        for i in range(width):
            lines[0, line, i], lines[1, line, i] = root, 0
            sees[line, i, 0] = 1
        for i in range(1, count):
            above = parents[first + i - 1] + 1
            if not 0 <= above < i:
                raise ValueError(f"parents: expected one before node {i - 1}, got {above - 1}")
            lines[0, line, i] = token_ids[first + i - 1]
            lines[1, line, i] = lines[1, line, above] + 1
            for j in range(1, above + 1):
                sees[line, i, j] = sees[line, above, j]
            sees[line, i, i] = 1
    return *numbers_out, *lines_out, sees_out.view(np.bool_)


def hiding(const unsigned char[:, :, :] sees, Py_ssize_t common, const unsigned char[::1] hidden):
    """The bytes of a mask: uint8 [lines, 1, width, (common + columns) x bytes of a number].

    Queries see the first `common` slots, where the mask is 0; of the others those that `sees` [lines,
    width, columns] says. What they do not see has the number of these bytes, `hidden`.
    """
    cdef Py_ssize_t lines = sees.shape[0], width = sees.shape[1], columns = sees.shape[2]
    cdef Py_ssize_t size = hidden.shape[0], line, i, j
    out = np.zeros((lines, 1, width, (common + columns) * size), np.uint8)
    cdef unsigned char[:, :, :, ::1] mask = out
    for line in range(lines):
        for i in range(width):
            for j in range(columns):
                if not sees[line, i, j]:
                    memcpy(&mask[line, 0, i, (common + j) * size], &hidden[0], size)
    return out


def fault(
    token_ids, parents, probs, classes, const int64_t[::1] offsets, token_t vocab_size,
    Py_ssize_t n_classes,
):
    """What breaks the contract of a token tree, in words; None: nothing does.

    The arrays hold several trees where `offsets`, int64 [trees + 1], tells where each begins; None:
    one. Everything that indexes memory by what a drafter returned relies on this. O(n times siblings).
    """
    cdef const token_t[::1] token_view
    cdef const int32_t[::1] parent_view, class_view
    cdef const float[::1] prob_view
    cdef int32_t* room
    cdef Py_ssize_t tree, first = 0, end
    found = None
    for array, dtype in zip((token_ids, parents, probs, classes), TREE_DTYPES):
        if not (isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype == dtype
                and array.flags.c_contiguous):
            names = ", ".join(str(dtype) for dtype in TREE_DTYPES)
            return f"expected contiguous arrays [n] of {names}, got {array!r:.80}"
    if not len(token_ids) == len(parents) == len(probs) == len(classes):
        return (
            f"token_ids, parents, probs, classes: expected equal lengths, got {len(token_ids)}, "
            f"{len(parents)}, {len(probs)}, {len(classes)}"
        )
    if offsets is None:
        offsets = np.array([0, len(token_ids)])
    token_view, parent_view, prob_view, class_view = token_ids, parents, probs, classes
    room = <int32_t*>resized(NULL, 2 * (token_view.shape[0] + 1) * sizeof(int32_t))
    for tree in range(offsets.shape[0] - 1):
        end = offsets[tree + 1]
        if not offsets[tree] == first <= end <= token_view.shape[0]:
            found = f"offsets: expected them to rise from 0 to {len(token_ids)}, got {end}"
        elif first < end:
            found = fault_of_nodes(
                &token_view[first], &parent_view[first], &prob_view[first], &class_view[first],
                <int32_t>(end - first), vocab_size, n_classes, no_children(room, end - first),
            )
        if found is not None:
            break
        first = end
    free(room)
    if found is None and first < token_view.shape[0]:
        found = "offsets: expected them to cover all nodes"
    return found


cdef struct Family:  # the children of a tree's nodes and, in front of them, of its root
    int32_t* last      # its last child so far, of each
    int32_t* sibling   # the child before, of each child

cdef inline Family no_children(int32_t* room, Py_ssize_t n) noexcept nogil:
    """The family of n nodes without any; there is room for 2 (n + 1) numbers."""
    memset(room, -1, 2 * (n + 1) * sizeof(int32_t))
    return Family(room + 1, room + n + 2)

cdef inline void add_child(Family f, int32_t parent, int32_t child) noexcept nogil:
    f.sibling[child] = f.last[parent]
    f.last[parent] = child

cdef inline int32_t child_of(Family f, const token_t* token_ids, int32_t parent, token_t token) noexcept nogil:
    """The child of a parent, −1: the root, that carries a token; −1: there is none."""
    cdef int32_t child = f.last[parent]
    while child >= 0 and token_ids[child] != token:
        child = f.sibling[child]
    return child


cdef object fault_of_nodes(
    const token_t* token_ids, const int32_t* parents, const float* probs, const int32_t* classes,
    int32_t n, token_t vocab_size, Py_ssize_t n_classes, Family family,
):
    """The first fault of a tree of n nodes; `family` has no children."""
    cdef int32_t i, p
    cdef float above
    for i in range(n):
        p = parents[i]
        if not 0 <= token_ids[i] < vocab_size:
            return f"token_ids: expected ids below {vocab_size}, got {token_ids[i]} at node {i}"
        if not -1 <= p < i:
            return f"parents: expected -1 or a node before node {i}, got {p}"
        if classes[i] >= n_classes:
            return f"classes: expected one of {n_classes}, or a negative one, got {classes[i]} at node {i}"
        above = 1 if p < 0 else probs[p]
        # NaN fails every comparison.
        if not 0 <= probs[i] <= above + 1e-5:
            return (
                "probs: expected probabilities, none above its parent's, got "
                f"{probs[i]:.6g} at node {i} below {above:.6g}"
            )
        if child_of(family, token_ids, p, token_ids[i]) >= 0:
            return f"token_ids: expected distinct siblings, got {token_ids[i]} twice below {p}"
        add_child(family, p, i)
    return None


def child(
    const token_t[::1] token_ids, const int32_t[::1] parents, const int64_t[::1] offsets, Py_ssize_t tree,
    int32_t parent, int64_t token,
):
    """The child of a node of one of several trees, −1: of its root, that carries a token; −1: there is none.

    `offsets`, int64 [trees + 1], tells where each tree begins, from where its nodes count. O(n).
    """
    cdef Py_ssize_t i
    if not (0 <= tree < offsets.shape[0] - 1 and parents.shape[0] == token_ids.shape[0]):
        raise ValueError(f"tree: expected 0 to {offsets.shape[0] - 2}, got {tree}")
    if not 0 <= offsets[tree] <= offsets[tree + 1] <= token_ids.shape[0]:
        raise ValueError(f"offsets: expected 0 to {token_ids.shape[0]}, got {offsets[tree + 1]}")
    for i in range(offsets[tree], offsets[tree + 1]):
        if parents[i] == parent and token_ids[i] == token:
            return i - offsets[tree]
    return -1


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
    cdef Py_ssize_t n = parents.shape[0]
    out = np.empty(min(n, tokens.shape[0]), dtype=np.int32)
    cdef int32_t[::1] path = out
    if not out.size:
        return out
    return out[:walked(&token_ids[0], &parents[0], n, &tokens[0], tokens.shape[0], &path[0])]


cdef Py_ssize_t walked(
    const token_t* token_ids, const int32_t* parents, Py_ssize_t n, const int32_t* tokens, Py_ssize_t m,
    int32_t* path,
) noexcept nogil:
    """How many of m tokens a tree of n nodes goes along with; their nodes are written to `path`, unless it
    is NULL."""
    cdef Py_ssize_t i, length = 0
    cdef int32_t here = -1
    for i in range(n):
        if length == m:
            break
        if parents[i] == here and token_ids[i] == tokens[length]:
            here = <int32_t>i
            if path != NULL:
                path[length] = here
            length += 1
    return length


def reached(list forests, Py_ssize_t tree, tokens):
    """How many of some tokens a tree of each of several forests goes along with, from its root on."""
    cdef const token_t[::1] ids
    cdef const int32_t[::1] parents
    cdef const int64_t[::1] offsets
    cdef int32_t* wanted
    cdef Py_ssize_t m = len(tokens), i
    found = []
    wanted = <int32_t*>resized(NULL, m * sizeof(int32_t))
    try:
        for i in range(m):
            wanted[i] = tokens[i]
        for forest in forests:
            ids, parents, offsets = forest.token_ids, forest.parents, forest.offsets
            if not 0 <= tree < offsets.shape[0] - 1:
                raise ValueError(f"tree: expected 0 to {offsets.shape[0] - 2}, got {tree}")
            check_offsets(offsets, offsets.shape[0] - 1, min(ids.shape[0], parents.shape[0]))
            i = offsets[tree + 1] - offsets[tree]
            found.append(0 if not i else walked(
                &ids[offsets[tree]], &parents[offsets[tree]], i, wanted, m, NULL
            ))
    finally:
        free(wanted)
    return found


cdef class _Nodes:
    """The four arrays of a tree while it is built."""

    cdef object token_ids, parents, probs, classes
    cdef token_t[::1] tokens
    cdef int32_t[::1] above
    cdef float[::1] prob
    cdef int32_t[::1] kind

    def __cinit__(self, Py_ssize_t n):
        self.token_ids = np.empty(n, np.int32)
        self.parents = np.empty(n, np.int32)
        self.probs = np.empty(n, np.float32)
        self.classes = np.empty(n, np.int32)
        self.tokens, self.above = self.token_ids, self.parents
        self.prob, self.kind = self.probs, self.classes

    cdef void put(self, Py_ssize_t i, token_t token, int32_t parent, float prob, int32_t kind) noexcept nogil:
        self.tokens[i] = token
        self.above[i] = parent
        self.prob[i] = prob
        self.kind[i] = kind

    cdef arrays(self, Py_ssize_t n):
        """The first n nodes: token ids, parents, probabilities and classes."""
        return self.token_ids[:n], self.parents[:n], self.probs[:n], self.classes[:n]


cdef int32_t* shared_places(
    const token_t[::1] tokens_a, const int32_t[::1] parents_a, const int64_t[::1] offsets_a,
    const token_t[::1] tokens_b, const int32_t[::1] parents_b, const int64_t[::1] offsets_b,
) except NULL:
    """The node of the first of two forests of as many trees on the path of every node of the second.

    int32 [nodes of the second], counted from its own tree's beginning; −1: there is none. For the caller
    to free. O(n_a + n_b x children of a node of the first).
    """
    cdef Py_ssize_t n = tokens_a.shape[0], m = tokens_b.shape[0], tree, a, b, i
    cdef const token_t* ids = &tokens_a[0] if n else NULL
    cdef int32_t* place
    cdef int32_t child, parent
    cdef Family family
    check_offsets(offsets_a, offsets_a.shape[0] - 1, n)
    check_offsets(offsets_b, offsets_a.shape[0] - 1, m)
    place = <int32_t*>resized(NULL, (m + 2 * (n + 1)) * sizeof(int32_t))
    with nogil:
        for tree in range(offsets_a.shape[0] - 1):
            a, b = offsets_a[tree], offsets_b[tree]
            family = no_children(place + m, offsets_a[tree + 1] - a)
            for child in range(<int32_t>(offsets_a[tree + 1] - a)):
                add_child(family, parents_a[a + child], child)
            for i in range(b, offsets_b[tree + 1]):
                parent = place[b + parents_b[i]] if parents_b[i] >= 0 else -1
                place[i] = -1
                if parent >= 0 or parents_b[i] < 0:
                    place[i] = child_of(family, ids + a, parent, tokens_b[i])
    return place


def merge(
    const token_t[::1] tokens_a, const int32_t[::1] parents_a, const float[::1] probs_a,
    const int32_t[::1] classes_a, const int64_t[::1] offsets_a,
    const token_t[::1] tokens_b, const int32_t[::1] parents_b, const float[::1] probs_b,
    const int32_t[::1] classes_b, const int64_t[::1] offsets_b,
):
    """The union of two trees' paths, for several pairs of trees; of a shared path the higher probability,
    with its class.

    Arrays hold one tree's nodes behind another's; `offsets`, int64 [trees + 1], tell where each begins,
    from where its parents count. Returns token ids, parents, probabilities, classes and offsets: of each
    pair the nodes of the first tree, then the new ones of the second, in their order. O(n_a + n_b x
    children of a node of the first tree).
    """
    cdef Py_ssize_t tree, i, first, total = 0
    cdef _Nodes out = _Nodes(tokens_a.shape[0] + tokens_b.shape[0])
    cdef int32_t parent
    offsets_out = np.zeros(offsets_a.shape[0], dtype=np.int64)
    cdef int64_t[::1] offsets = offsets_out
    cdef int32_t* place = shared_places(tokens_a, parents_a, offsets_a, tokens_b, parents_b, offsets_b)
    for tree in range(offsets_a.shape[0] - 1):
        first = total
        for i in range(offsets_a[tree], offsets_a[tree + 1]):
            out.put(total, tokens_a[i], parents_a[i], probs_a[i], classes_a[i])
            total += 1
        for i in range(offsets_b[tree], offsets_b[tree + 1]):
            if place[i] < 0:
                parent = place[offsets_b[tree] + parents_b[i]] if parents_b[i] >= 0 else -1
                out.put(total, tokens_b[i], parent, probs_b[i], classes_b[i])
                place[i] = <int32_t>(total - first)
                total += 1
            elif probs_b[i] > out.prob[first + place[i]]:
                out.prob[first + place[i]] = probs_b[i]
                out.kind[first + place[i]] = classes_b[i]
        offsets[tree + 1] = total
    free(place)
    return (*out.arrays(total), offsets_out)


# Nodes by their probability: the likeliest of trees, and what steps over several bring.

cdef int64_t* ranking(const float[::1] probs, Py_ssize_t first, Py_ssize_t n) except NULL:
    """The n nodes from `first` on by falling probability, for the caller to free.

    Of equal ones the earlier node comes first, which is no descendant. They count from `first`.
    """
    cdef int64_t* ranked = <int64_t*>resized(NULL, n * sizeof(int64_t))
    cdef Py_ssize_t i
    cdef int32_t bits
    for i in range(n):
        memcpy(&bits, &probs[first + i], sizeof(bits))  # which rise with a positive number
        ranked[i] = sort_key(-<int64_t>bits, <int32_t>i)
    sort(ranked, n)
    return ranked


def prune(
    const token_t[::1] token_ids, const int32_t[::1] parents, const float[::1] probs,
    const int32_t[::1] classes, const int64_t[::1] offsets, const int64_t[::1] budgets,
):
    """Each of several trees' `budgets` most probable nodes, in their order.

    One tree's nodes stand behind another's in the arrays; `offsets`, int64 [trees + 1], tells where each
    tree begins. Returns four arrays and offsets. O(n log n).
    """
    cdef Py_ssize_t trees = budgets.shape[0], tree, i, first, size, kept = 0
    check_offsets(offsets, trees, token_ids.shape[0])
    cdef _Nodes out = _Nodes(token_ids.shape[0])
    ends_out = np.zeros(trees + 1, np.int64)
    cdef int64_t[::1] ends = ends_out
    cdef int32_t* place = <int32_t*>resized(NULL, token_ids.shape[0] * sizeof(int32_t))
    cdef int64_t* ranked
    cdef int32_t parent
    for tree in range(trees):
        first, size = offsets[tree], offsets[tree + 1] - offsets[tree]
        ranked = ranking(probs, first, size)
        for i in range(size):
            place[first + key_value(ranked[i])] = 0 if i < budgets[tree] else -1
        free(ranked)
        for i in range(first, first + size):
            if place[i] == 0:
                place[i] = <int32_t>(kept - ends[tree])
                parent = place[first + parents[i]] if parents[i] >= 0 else -1
                out.put(kept, token_ids[i], parent, probs[i], classes[i])
                kept += 1
        ends[tree + 1] = kept
    free(place)
    return *out.arrays(kept), ends_out


def by_width(const float[::1] probs, const int64_t[::1] offsets):
    """Tokens that a step over several trees brings, all of them together, when each verifies its 0, 1,
    ... most probable nodes: float64 [nodes of the largest + 1].

    `probs` and `offsets` as for `rank`. O(n log n).
    """
    cdef Py_ssize_t trees = offsets.shape[0] - 1, tree, i, first, size, widest = 0
    cdef int64_t* ranked
    check_offsets(offsets, trees, probs.shape[0])
    for tree in range(trees):
        widest = max(widest, offsets[tree + 1] - offsets[tree])
    tokens_out = np.zeros(widest + 1)
    cdef double[::1] tokens = tokens_out
    tokens[0] = trees
    for tree in range(trees):
        first, size = offsets[tree], offsets[tree + 1] - offsets[tree]
        ranked = ranking(probs, first, size)
        for i in range(size):
            tokens[i + 1] += probs[first + key_value(ranked[i])]
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
    cdef int64_t* ranked
    check_offsets(offsets, count, n)
    for tree in range(count):
        for i in range(offsets[tree], offsets[tree + 1]):
            owners[i] = tree
    ranked = ranking(probs, 0, n)
    tokens[0] = count
    for i in range(n):
        trees[i] = owners[key_value(ranked[i])]
        tokens[i + 1] = tokens[i] + probs[key_value(ranked[i])]
    free(ranked)
    return trees_out, tokens_out


def best_paths(
    const token_t[::1] token_ids, const int32_t[::1] parents, const float[::1] probs,
    const int32_t[::1] classes, const int64_t[::1] offsets,
):
    """Each of several trees' path to a leaf with the largest sum of probabilities, the first of equal
    ones.

    `offsets`, int64 [trees + 1], tells where each tree begins, from where its parents count. Returns four
    arrays and offsets. O(n).
    """
    cdef Py_ssize_t n = parents.shape[0], count = offsets.shape[0] - 1, tree, i, first, end = 0
    cdef int32_t node
    cdef _Nodes out = _Nodes(n)
    sums_out, ends_out = np.empty(n), np.zeros(count + 1, np.int64)
    cdef double[::1] sums = sums_out
    cdef int64_t[::1] ends = ends_out
    check_offsets(offsets, count, n)
    for tree in range(count):
        first, node = offsets[tree], -1
        for i in range(first, offsets[tree + 1]):
            sums[i] = probs[i] + (sums[first + parents[i]] if parents[i] >= 0 else 0)
            if node < 0 or sums[i] > sums[node] or first + parents[i] == node:
                node = <int32_t>i
        # The leaf comes first, each node at the place that the path has in the end.
        i = node
        while i >= 0:
            end += 1
            i = first + parents[i] if parents[i] >= 0 else -1
        ends[tree + 1] = i = end
        while node >= 0:
            i -= 1
            out.put(i, token_ids[node], <int32_t>(i - ends[tree]) - 1, probs[node], classes[node])
            node = <int32_t>first + parents[node] if parents[node] >= 0 else -1
    return *out.arrays(end), ends_out
