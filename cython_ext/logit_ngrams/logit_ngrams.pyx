"""What a model thought likely behind the last one to four tokens of texts, and drafts from that.

STAND (Song et al. 2025, https://arxiv.org/abs/2506.04708, section 3) keeps such a table, and samples its drafts. Here
all lengths of context are mixed; and where the numbers are known that will draw the tokens (`draws.Numbers`), the
likeliest ones race with them.
"""

import numpy as np

from libc.math cimport INFINITY, expf, logf, powf
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memset

from common.blocks cimport resized
from common.checks cimport check_offsets
from common.heap cimport Entry, pop, push
from common.twister cimport gain_of, tempered
from common.types cimport int32_t, int64_t, token_t

cdef enum:
    ORDERS = 4                     # lengths of a context: 1 to this one
    TOP = 10                       # likeliest tokens that are kept
    CANDIDATES = TOP * (ORDERS + 1)
    STEPS = 12                     # classes of rates
    MODES = 3
    LIKELIEST_ONE = 0
    BY_CHANCE = 1
    BY_NUMBERS = 2

LIKELIEST = TOP
# How tokens are chosen: the likeliest one, or drawn by numbers that nobody knows, or by numbers that are known.
GREEDY, BLIND, RACED = LIKELIEST_ONE, BY_CHANCE, BY_NUMBERS
# Evidence: how a token is chosen, tokens of the longest context that is known, and a step of the rate that follows.
CLASS_SHAPE = (MODES, ORDERS + 1, STEPS)
# Where steps begin.
RATE_EDGES = np.array([0.006, 0.012, 0.025, 0.05, 0.1, 0.18, 0.3, 0.45, 0.6, 0.78, 0.92], np.float32)
cdef float[STEPS - 1] EDGES = RATE_EDGES

include "table.pxi"
include "mixing.pxi"


cdef class NgramText:
    """A text that is drafted for: its last tokens, and what its last one was chosen from.

    Args:
        shared: what it is drafted from, and teaches.
        own: what it teaches in place of that, and is drafted from first; None: nothing.
    """

    cdef Ngrams shared, own
    cdef token_t[ORDERS] last  # the last one first, −1: there are fewer
    cdef Row nearly            # no ids: unknown

    def __init__(self, Ngrams shared not None, Ngrams own=None):
        cdef int32_t i
        self.shared, self.own = shared, own
        self.nearly.ids[0] = -1
        for i in range(ORDERS):
            self.last[i] = -1

    cdef Row* find(self, uint64_t key) noexcept:
        cdef Row* found = NULL
        if self.own is not None:
            found = self.own.find(key)
        return self.shared.find(key) if found == NULL else found

    cdef void mix(self, const token_t* last, const Row* nearly, Mix* m) noexcept:
        """What may follow the last tokens, the last one of which stands first, where `nearly` was likely."""
        cdef Row* rows[ORDERS]
        cdef uint64_t key = NO_TOKENS
        cdef int32_t order
        cdef float rest = 1
        m.size = m.order = 0
        for order in range(ORDERS):
            rows[order] = NULL
            if last[order] >= 0:
                key = extended(key, last[order])
                rows[order] = self.find(key)
            if rows[order] != NULL:
                m.order = order + 1
        for order in range(m.order - 1, -1, -1):
            if rows[order] != NULL:
                add_row(m, rows[order], rest * OWN, -1)
                rest *= 1 - OWN
        add_nearly(m, nearly, last[0])

    def extend(self, token_ids):
        """Append the tokens by which the text went on."""
        cdef token_t token
        cdef int32_t i
        for token in token_ids[-ORDERS:]:
            for i in range(ORDERS - 1, 0, -1):
                self.last[i] = self.last[i - 1]
            self.last[0] = token

    def forget_last(self):
        """What the last token was chosen from is not known."""
        self.nearly.ids[0] = -1


cdef bint read_row(const token_t[:, :] ids, const float[:, :] logits, Py_ssize_t i, Row* out) noexcept:
    """The likeliest tokens and their shares, of descending logits; whether there are any."""
    cdef Py_ssize_t k = min(ids.shape[1], <Py_ssize_t>TOP), j
    cdef float total = 0
    for j in range(TOP):
        out.ids[j] = ids[i, j] if j < k else -1
        out.shares[j] = expf(logits[i, j] - logits[i, 0]) if j < k else 0
        total += out.shares[j]
    if not 0 < total < INFINITY:
        return False
    for j in range(TOP):
        out.shares[j] /= total
    return True


def learn(
    list texts, const int64_t[::1] starts, const token_t[::1] fed, const int32_t[::1] parents,
    const int64_t[::1] ends, const int64_t[::1] nodes, const token_t[:, :] ids, const float[:, :] logits,
):
    """Learn what was likely behind tokens that a forward has fed.

    Args:
        texts: `NgramText` of each text, whose last tokens end with the first one that was fed of it.
        starts: int64 [texts + 1], where each text's fed tokens begin.
        fed, parents: int32 [n], tokens, and which one of its text each follows; −1: the text before.
        ends: int64 [texts], the token behind which each text's next one was chosen; −1: unknown.
        nodes: int64 [m], which of the n were learnt of, ascending.
        ids, logits: [m, k], the likeliest tokens behind each, the likeliest one first, and their logits.
    """
    cdef Py_ssize_t n = fed.shape[0], i, row = 0, before
    cdef int64_t at
    cdef int32_t order
    cdef uint64_t key
    cdef token_t token
    cdef NgramText text
    cdef Ngrams table
    cdef Row found
    check_offsets(starts, len(texts), n)
    if parents.shape[0] != n or ends.shape[0] != len(texts):
        raise ValueError(f"parents, ends: expected {n} and {len(texts)} of them")
    if not ids.shape[0] == logits.shape[0] == nodes.shape[0] or not 0 < ids.shape[1] <= logits.shape[1]:
        raise ValueError(f"ids, logits: expected {nodes.shape[0]} rows of equal length")
    for i in range(n):
        while i >= starts[row + 1]:
            row += 1
        if not -1 <= parents[i] < i - starts[row]:
            raise ValueError(f"parents: expected -1 to {i - starts[row] - 1}, got {parents[i]}")
    for text in texts:
        text.forget_last()
    row = 0
    for i in range(nodes.shape[0]):
        if not 0 <= nodes[i] < n:
            raise ValueError(f"nodes: expected 0 to {n - 1}, got {nodes[i]}")
        while nodes[i] >= starts[row + 1]:
            row += 1
        if not read_row(ids, logits, i, &found):
            continue
        text = texts[row]
        if nodes[i] == ends[row]:
            text.nearly = found
        table = text.shared if text.own is None else text.own
        table.now += 1
        # The text's last token is the first one that was fed.
        key, at, before = NO_TOKENS, nodes[i], 1
        for order in range(ORDERS):
            if at >= starts[row]:
                token = fed[at]
                at = parents[at] + starts[row] if parents[at] >= 0 else -1
            elif before < ORDERS:
                token = text.last[before]
                before += 1
            else:
                break
            if token < 0:
                break
            key = extended(key, token)
            table.learn(key, &found)


cdef struct Node:  # a token that may be drafted
    token_t token
    int32_t parent, evidence, depth
    float prob


cdef struct Growth:  # a draft
    Node* nodes         # that may be drafted
    int32_t made        # so many of them
    Entry* heap         # those that are not drafted yet, the most probable one first
    int32_t queued
    int32_t* drafted    # nodes that are
    int32_t size        # so many
    Row* likely         # what each of these had for its children, the text's end in front of them
    float min_prob


cdef inline int32_t step_of(float rate) noexcept nogil:
    cdef int32_t i, step = 0
    for i in range(STEPS - 1):
        step += rate > EDGES[i]
    return step


cdef void queue_children(
    Growth* g, const Mix* m, int32_t mode, const float* rates, int32_t parent, int32_t depth, float above
) noexcept nogil:
    """Queue what may follow a drafted node, −1: the text's end."""
    cdef int32_t i, evidence, first = (mode * (ORDERS + 1) + m.order) * STEPS
    cdef float prob
    for i in range(m.size):
        evidence = first + step_of(m.rates[i])
        prob = above * rates[evidence]
        if prob >= g.min_prob:
            g.nodes[g.made] = Node(m.ids[i], parent, evidence, depth, prob)
            # The likelier ones of one step come first.
            push(g.heap, &g.queued, Entry(prob * (1 + 0.001 * m.rates[i]), g.made, g.made))
            g.made += 1


cdef int grow(
    Growth* g, NgramText text, int64_t budget, const Law* law, list numbers, const float* rates, token_t vocab_size
) except -1:
    """Draft behind a text."""
    cdef int32_t parent = -1, at, order, given, depth = 0
    cdef float prob = 1
    cdef token_t[ORDERS] last
    cdef const Row* nearly = &text.nearly
    cdef const uint32_t[::1] words
    cdef Mix m
    g.made = g.queued = g.size = 0
    while g.size < budget:
        if law.mode != BY_NUMBERS or depth < len(numbers):
            at, given = parent, 0
            for order in range(ORDERS):
                if at >= 0:
                    last[order], at = g.nodes[g.drafted[at]].token, g.nodes[g.drafted[at]].parent
                else:
                    last[order] = text.last[given]
                    given += 1
            text.mix(&last[0], nearly, &m)
            remove_rare(&m, vocab_size)
            sort_shares(&m)
            take_likeliest(&m, &g.likely[parent + 1])
            if law.mode == BY_NUMBERS:
                words = numbers[depth]
                if words.shape[0] < 2 * vocab_size:
                    raise ValueError(f"numbers: expected {2 * vocab_size} words, got {words.shape[0]}")
            if law.mode != LIKELIEST_ONE:
                remove_warped(&m, law)
            rate(&m, law, &words[0] if law.mode == BY_NUMBERS else NULL)
            queue_children(g, &m, law.mode, rates, parent, depth + 1, prob)
        if not g.queued:
            break
        at = pop(g.heap, &g.queued).index
        g.drafted[g.size] = at
        nearly = &g.likely[g.nodes[at].parent + 1]
        parent, depth, prob = g.size, g.nodes[at].depth, g.nodes[at].prob
        g.size += 1
    return 0


def draft(
    list texts, const int64_t[::1] budgets, list laws, list numbers, const float[::1] rates, token_t vocab_size,
    float min_prob,
):
    """Trees of what is likeliest behind texts, best first.

    Args:
        texts: `NgramText` of each text.
        budgets: int64 [texts], nodes at most.
        laws: of each text, (mode, temperature, top_k, top_p, min_p).
        numbers: of each text, a list of `Numbers.words` of its next draws, by as many of which RACED drafts are deep.
        rates: float32 [classes], how often nodes of each class are right where their parents are.
        vocab_size: tokens from there on are not drafted.
        min_prob: nodes that are less probable are not drafted.

    Returns int32 token ids, int32 parents, float32 probs, int32 evidence, each [nodes] of one text's tree behind
    another's, and int64 [texts + 1], where each begins. Raises ValueError for sizes that do not fit.
    """
    cdef Py_ssize_t count = len(texts), row, i, most = 0, total = 0, end = 0
    if not budgets.shape[0] == len(laws) == len(numbers) == count:
        raise ValueError(f"budgets, laws, numbers: expected {count} of each")
    if rates.shape[0] != MODES * (ORDERS + 1) * STEPS:
        raise ValueError(f"rates: expected {MODES * (ORDERS + 1) * STEPS} of them, got {rates.shape[0]}")
    for row in range(count):
        most = max(most, budgets[row])
        total += max(budgets[row], 0)
    ints_out, probs_out = np.empty((3, total + 1), np.int32), np.empty(total + 1, np.float32)
    offsets_out = np.zeros(count + 1, np.int64)
    cdef int32_t[:, ::1] ints = ints_out
    cdef float[::1] probs = probs_out
    cdef int64_t[::1] offsets = offsets_out
    cdef Law law
    cdef Growth g
    cdef const Node* node
    g.min_prob, g.nodes, g.heap, g.drafted, g.likely = min_prob, NULL, NULL, NULL, NULL
    try:
        g.nodes = <Node*>resized(NULL, (most + 1) * CANDIDATES * sizeof(Node))
        g.heap = <Entry*>resized(NULL, (most + 1) * CANDIDATES * sizeof(Entry))
        g.drafted = <int32_t*>resized(NULL, (most + 1) * sizeof(int32_t))
        g.likely = <Row*>resized(NULL, (most + 1) * sizeof(Row))
        for row in range(count):
            law.mode, law.temperature, law.top_k, law.top_p, law.min_p = laws[row]
            if not 0 <= law.mode < MODES or (law.mode and not law.temperature > 0):
                raise ValueError(f"laws: expected a mode and a positive temperature, got {laws[row]}")
            grow(&g, <NgramText?>texts[row], budgets[row], &law, <list?>numbers[row], &rates[0], vocab_size)
            for i in range(g.size):
                node = &g.nodes[g.drafted[i]]
                ints[0, end], ints[1, end], ints[2, end], probs[end] = node.token, node.parent, node.evidence, node.prob
                end += 1
            offsets[row + 1] = end
    finally:
        free(g.nodes)
        free(g.heap)
        free(g.drafted)
        free(g.likely)
    return ints_out[0, :end], ints_out[1, :end], probs_out[:end], ints_out[2, :end], offsets_out
