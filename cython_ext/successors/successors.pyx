"""A table of successors, for every token those that are likely to follow it, best first: drafts from it,
and what it learns."""

import numpy as np

from libc.math cimport expf
from libc.stdint cimport int64_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memset

from common.blocks cimport resized
from common.largest cimport largest
from common.sort cimport sort
from common.types cimport int32_t, token_t, uint8_t

cdef class Template:
    """A tree of ranks, and what the evidence of its nodes is worth.

    Node "rank r below p" stands for the r-th successor of p's token; parents come first.

    Args:
        parents, ranks: int32 [n]. Parent −1 is the root.
        rates: float32 [kinds], probability that a successor is right, given that its parent is.
    """

    cdef const int32_t[::1] parents, ranks
    cdef const float[::1] rates

    def __cinit__(self, parents, ranks, rates):
        self.parents, self.ranks, self.rates = parents, ranks, rates
        if len(ranks) != len(parents):
            raise ValueError(f"ranks: expected {len(parents)} of them, got {len(ranks)}")


cdef struct Table:
    const token_t* successors
    const uint8_t* kinds
    Py_ssize_t tokens, width


cdef inline int32_t look_up(Table table, token_t token, Py_ssize_t rank, token_t* found) noexcept nogil:
    """A successor of a token, and the kind of its evidence; −1 for what is unknown."""
    found[0] = -1
    if 0 <= token < table.tokens and 0 <= rank < table.width:
        found[0] = table.successors[token * table.width + rank]
        return table.kinds[token * table.width + rank]
    return 0


cdef struct Nodes:  # where a draft is written, and room for as many numbers
    token_t* tokens
    int32_t* parents
    float* probs
    int32_t* evidence
    int32_t* places
    int32_t* chosen
    float* best


cdef Py_ssize_t lay_template(Template t, Table table, token_t root, Nodes out) except -1:
    """Lay a template over a table; the number of known nodes, which it writes.

    `places` tells of each template node its place in the draft, −1: unknown.
    """
    cdef Py_ssize_t i, known = 0
    cdef token_t token
    cdef int32_t parent, kind
    cdef float prob
    for i in range(t.parents.shape[0]):
        out.places[i] = parent = -1
        token, prob = root, 1
        if t.parents[i] >= 0:
            parent = out.places[t.parents[i]]
            if parent < 0:
                continue
            token, prob = out.tokens[parent], out.probs[parent]
        kind = look_up(table, token, t.ranks[i], &token)
        if token < 0:
            continue
        if not 0 <= kind < t.rates.shape[0]:
            raise ValueError(f"kinds: expected below {t.rates.shape[0]}, got {kind}")
        out.tokens[known], out.parents[known], out.evidence[known] = token, parent, kind
        out.probs[known] = prob * t.rates[kind]
        out.places[i] = <int32_t>known
        known += 1
    return known


cdef Py_ssize_t select_best(Py_ssize_t known, Py_ssize_t budget, Nodes out) noexcept nogil:
    """Keep the `budget` most probable of more nodes, in their order; returns their number."""
    cdef Py_ssize_t i, kept = 0
    if budget < 1:
        return 0
    largest(out.probs, known, budget, out.best, out.chosen)
    for i in range(known):
        out.places[i] = -1
    for i in range(budget):
        out.places[out.chosen[i]] = 0
    for i in range(known):
        if out.places[i] < 0:
            continue
        out.tokens[kept], out.probs[kept] = out.tokens[i], out.probs[i]
        out.evidence[kept] = out.evidence[i]
        out.parents[kept] = out.places[out.parents[i]] if out.parents[i] >= 0 else -1
        out.places[i] = <int32_t>kept
        kept += 1
    return kept


def draft(
    const token_t[:, ::1] successors, const uint8_t[:, ::1] kinds, const token_t[::1] roots,
    const int64_t[::1] budgets, Template template not None,
):
    """A template laid over the table below the last token of each of several texts, without what is unknown.

    A negative successor is unknown, and so is all below it, and below a token beyond the table's rows.

    Args:
        successors, kinds: int32 and uint8 [tokens, k], the table and the evidence of each entry.
        roots: int32 [texts], the last token of each.
        budgets: int64 [texts], nodes at most, the most probable ones; of equal ones the first.

    Returns int32 token ids, int32 parents, float32 probs, int32 evidence, each [nodes] of one text's tree
    behind another's, and int64 [texts + 1], where each begins. O(texts x n).
    """
    cdef Py_ssize_t n = template.parents.shape[0], count = roots.shape[0], row, end = 0, known
    cdef Table table
    cdef Nodes out
    if budgets.shape[0] != count:
        raise ValueError(f"expected {count} budgets")
    table.tokens, table.width = successors.shape[0], successors.shape[1]
    if not (kinds.shape[0] == table.tokens and kinds.shape[1] == table.width):
        raise ValueError(f"kinds: expected [{table.tokens}, {table.width}], got another shape")
    if table.tokens * table.width:
        table.successors, table.kinds = &successors[0, 0], &kinds[0, 0]
    ints_out, probs_out = np.empty((5, count * n + 1), np.int32), np.empty((2, count * n + 1), np.float32)
    offsets_out = np.zeros(count + 1, np.int64)
    cdef int32_t[:, ::1] ints = ints_out
    cdef float[:, ::1] probs = probs_out
    cdef int64_t[::1] offsets = offsets_out
    out.places, out.chosen, out.best = &ints[3, 0], &ints[4, 0], &probs[1, 0]
    for row in range(count):
        out.tokens, out.parents, out.evidence = &ints[0, end], &ints[1, end], &ints[2, end]
        out.probs = &probs[0, end]
        known = lay_template(template, table, roots[row], out)
        end += select_best(known, budgets[row], out) if budgets[row] < known else known
        offsets[row + 1] = end
    return *ints_out[:2, :end], probs_out[0, :end], ints_out[2, :end], offsets_out


cdef inline int32_t index_of(const token_t* row, Py_ssize_t k, token_t token) noexcept nogil:
    """Place of a token in a row, −1: it is not there."""
    cdef Py_ssize_t j
    for j in range(k):
        if row[j] == token:
            return <int32_t>j
    return -1


cdef void replace(
    token_t* row, uint8_t* classes, Py_ssize_t k, const token_t* new, const uint8_t* kinds,
    int32_t kind_count,
) noexcept nogil:
    """Put `new` in a row's place, each with its kind of evidence and its stability; see `write`.

    A first successor that stays is accepted more than twice as often as a new one of equal share.
    """
    cdef int32_t first = classes[0] // kind_count, place, stability
    cdef Py_ssize_t j
    for j in range(k):
        place = index_of(row, k, new[j])
        stability = (place >= 0) + (place == 0) + (place == 0 and first >= 2)
        classes[j] = <uint8_t>(stability * kind_count + kinds[j])
    memcpy(row, new, k * sizeof(token_t))


cdef int check_rows(
    token_t[:, ::1] successors, uint8_t[:, ::1] classes, const token_t[::1] tokens, token_t least
) except -1:
    """Raise unless the table has a row for every token from `least` on, and none is lower."""
    cdef Py_ssize_t rows = min(successors.shape[0], classes.shape[0]), i
    if successors.shape[1] > classes.shape[1]:
        raise ValueError(f"classes: expected {successors.shape[1]} columns, got {classes.shape[1]}")
    for i in range(tokens.shape[0]):
        if not least <= tokens[i] < rows:
            raise ValueError(f"tokens: expected {least} to {rows - 1}, got {tokens[i]}")
    return 0


def rows_to_learn(
    const token_t[::1] tokens, const int64_t[::1] accepted, int64_t vocab_size, int64_t max_rejected,
    const int64_t[::1] starts,
):
    """Which fed nodes to learn from, ascending: one per distinct token.

    Of nodes with the same token the last accepted one counts, else the last rejected one. Of the
    rejected ones only the first `max_rejected` of each text are kept: the nearest to the root.

    Args:
        tokens: int32 [n], that were fed.
        accepted: int64, which of them the texts went on with.
        starts: int64, the first node of each text.

    Returns int64 [nodes]. O(n log n).
    """
    cdef Py_ssize_t n = tokens.shape[0], i, text = 0, count = 0
    cdef int64_t rejected = 0, node
    found = np.empty(n, np.int64)
    cdef int64_t[::1] nodes = found
    for i in range(accepted.shape[0]):
        if not 0 <= accepted[i] < n:
            raise ValueError(f"accepted: expected 0 to {n - 1}, got {accepted[i]}")
    # Sorted by token; the last accepted node of one token comes last, or the last rejected one.
    cdef int64_t* fed = <int64_t*>resized(NULL, n * (sizeof(int64_t) + sizeof(uint8_t)))
    cdef uint8_t* learnt = <uint8_t*>(fed + n)
    with nogil:
        memset(learnt, 1, n)
        for i in range(accepted.shape[0]):
            learnt[accepted[i]] = 2
        for i in range(n):
            fed[i] = (2 * <int64_t>tokens[i] + learnt[i] - 1) * (<int64_t>1 << 31) + i
        sort(fed, n)
        for i in range(n):
            node = fed[i] & 0x7FFFFFFF
            if tokens[node] >= vocab_size or (i + 1 < n and fed[i + 1] >> 32 == fed[i] >> 32):
                learnt[node] = 0
        for i in range(n):
            while text + 1 < starts.shape[0] and starts[text + 1] <= i:
                text, rejected = text + 1, 0
            if learnt[i] == 0 or (learnt[i] == 1 and rejected == max_rejected):
                continue
            rejected += learnt[i] == 1
            nodes[count] = i
            count += 1
    free(fed)
    return found[:count]


def write(
    token_t[:, ::1] successors, uint8_t[:, ::1] classes, const token_t[::1] tokens,
    const token_t[:, :] new, const float[:, :] logits, const float[::1] edges, int32_t kind_count,
):
    """Replace the rows of distinct tokens [n] by successors [n, k] with these logits, largest first.

    `successors` and `classes` [rows, k] are the table and its evidence: the kind plus `kind_count`
    times the stability, 0 for a successor that was not in the old row, 1 for one below its first place,
    2 for its first one, 3 for one that had stayed the first already. The kind is how many of the
    `edges`, ascending, lie below the successor's share among the k, which stands for its probability:
    that would cost a pass over the whole vocabulary. O(n k²).
    """
    cdef Py_ssize_t n = tokens.shape[0], k = successors.shape[1], i, j, edge
    cdef float total
    check_rows(successors, classes, tokens, 0)
    if (new.shape[0], new.shape[1]) != (n, k) or (logits.shape[0], logits.shape[1]) != (n, k):
        raise ValueError(
            f"expected {n} rows of {k} successors and logits, got {new.shape[0]} of {new.shape[1]} and "
            f"{logits.shape[0]} of {logits.shape[1]}"
        )
    if not k:
        return
    cdef float* shares = <float*>resized(NULL, k * (sizeof(float) + sizeof(token_t) + sizeof(uint8_t)))
    cdef token_t* row = <token_t*>(shares + k)
    cdef uint8_t* kinds = <uint8_t*>(row + k)
    with nogil:
        for i in range(n):
            total = 0
            for j in range(k):
                shares[j] = expf(logits[i, j] - logits[i, 0])
                total += shares[j]
            for j in range(k):
                row[j], kinds[j] = new[i, j], 0
                for edge in range(edges.shape[0]):
                    kinds[j] += not shares[j] / total <= edges[edge]
            replace(&successors[tokens[i], 0], &classes[tokens[i], 0], k, row, kinds, kind_count)
    free(shares)


def learn_text(
    token_t[:, ::1] successors, uint8_t[:, ::1] classes, const token_t[::1] tokens,
    const int32_t[::1] rows, const int64_t[::1] order, const uint8_t[::1] kinds, int32_t kind_count,
):
    """Move what followed each token in a text to the front of its row, the latest first.

    Args:
        successors, classes, kind_count: as for `write`.
        tokens: int32 [n], −1 for what the table knows nothing of.
        rows: int32 [n − 1], the table's row of each token but the last one, −1 where it has none.
        order: int64 [n − 1], all tokens but the last one, equal ones together and as in the text.
        kinds: uint8 [k], of each rank.
    """
    cdef Py_ssize_t n = order.shape[0], k = successors.shape[1], i = 0, end, j, size
    cdef token_t* new
    cdef token_t follower
    cdef int32_t row
    if n != max(0, tokens.shape[0] - 1) or rows.shape[0] != n or kinds.shape[0] != k:
        raise ValueError(
            f"expected order and rows of {max(0, tokens.shape[0] - 1)} tokens and {k} kinds, got {n}, "
            f"{rows.shape[0]} and {kinds.shape[0]}"
        )
    check_rows(successors, classes, rows, -1)
    new = <token_t*>resized(NULL, k * sizeof(token_t))
    while i < n:
        row, end, size = rows[order[i]], i, 0
        while i < n and rows[order[i]] == row:
            i += 1
        if row < 0:
            continue
        for j in range(i - 1, end - 1, -1):
            follower = tokens[order[j] + 1]
            if size < k and follower >= 0 and index_of(new, size, follower) < 0:
                new[size] = follower
                size += 1
        if not size:
            continue
        for j in range(k):
            if size < k and index_of(new, size, successors[row, j]) < 0:
                new[size] = successors[row, j]
                size += 1
        while size < k:  # unknown ones, which are equal
            new[size] = -1
            size += 1
        replace(&successors[row, 0], &classes[row, 0], k, new, &kinds[0], kind_count)
    free(new)
