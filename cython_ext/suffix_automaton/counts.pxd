# cython: cdivision=True
# What a finished suffix automaton knows by counting: occurrences, and drafts that branch by them.
from libc.stdlib cimport calloc, free, malloc, qsort

from suffix_automaton.core cimport (
    ROOT, SEPARATOR, Automaton, branch_cell, count_of, first_target, first_token, latest_cell,
    latest_end, link_of,
)
from suffix_automaton.transition_table cimport NO_TOKEN, Slot, find
from common.types cimport int32_t, int64_t, state_t, token_t

cdef enum:
    FINISHED = -1


# -- occurrence counts -----------------------------------------------------------------------------

cdef inline int32_t* cell_of(int32_t* positions, int32_t* clones, state_t s) noexcept nogil:
    return &positions[s] if s >= 0 else &clones[~s]


cdef inline void fold_up(
    Automaton* a, int32_t* open_positions, int32_t* open_clones, state_t s
) noexcept nogil:
    """Add a finished state to its link, and go on there if it was the link's last open child."""
    cdef state_t link
    cdef int32_t* children
    while s != ROOT:
        link = link_of(a, s)
        cell_of(a.position_counts, a.clone_counts, link)[0] += count_of(a, s)
        if latest_end(a, s) > latest_end(a, link):
            latest_cell(a, link)[0] = latest_end(a, s)
        children = cell_of(open_positions, open_clones, link)
        children[0] -= 1
        if children[0] > 0:
            return
        children[0] = FINISHED
        s = link


cdef inline void accumulate(Automaton* a, int32_t* open_positions, int32_t* open_clones) noexcept nogil:
    """Occurrences and latest ends, from the leaves of the link tree upwards. O(states).

    Every clone has children, so the leaves are prefixes. `open_*` count children not yet added.
    """
    cdef int64_t i
    for i in range(1, a.n + 1):
        cell_of(open_positions, open_clones, a.positions[i].link)[0] += 1
        a.position_counts[i] = a.positions[i].token != SEPARATOR
    for i in range(a.clone_count):
        cell_of(open_positions, open_clones, a.clones[i].link)[0] += 1
    for i in range(1, a.n + 1):
        if open_positions[i] == 0:
            fold_up(a, open_positions, open_clones, <state_t>i)


cdef inline void release_counts(Automaton* a) noexcept nogil:
    free(a.position_counts)
    free(a.clone_counts)
    a.position_counts = a.clone_counts = NULL


cdef inline int count_occurrences(Automaton* a) except -1 nogil:
    cdef int32_t* open_positions = <int32_t*>calloc(a.n + 1, sizeof(int32_t))
    cdef int32_t* open_clones = <int32_t*>calloc(a.clone_count + 1, sizeof(int32_t))
    a.position_counts = <int32_t*>calloc(a.n + 1, sizeof(int32_t))
    a.clone_counts = <int32_t*>calloc(a.clone_count + 1, sizeof(int32_t))
    cdef bint done = open_positions and open_clones and a.position_counts and a.clone_counts
    if done:
        accumulate(a, open_positions, open_clones)
    free(open_positions)
    free(open_clones)
    if not done:
        release_counts(a)
        with gil:
            raise MemoryError(f"no memory to count {a.n + a.clone_count} states")
    return 0


cdef struct Branch:
    token_t token
    int32_t count


cdef inline int by_count(const void* x, const void* y) noexcept nogil:
    """Frequent first; ties by token, so that equal texts give equal drafts."""
    cdef const Branch* b = <const Branch*>x
    cdef const Branch* c = <const Branch*>y
    if b.count != c.count:
        return -1 if b.count > c.count else 1
    return (b.token > c.token) - (b.token < c.token)


cdef inline int64_t read_branches(const Automaton* a, state_t s, Branch* out) noexcept nogil:
    cdef token_t token = branch_cell(a, s)[0]
    cdef const Slot* slot
    cdef int64_t n = 0
    while token != NO_TOKEN:
        slot = find(&a.branches, s, token)
        out[n].token, out[n].count = token, count_of(a, slot.target)
        token = slot.next_branch
        n += 1
    return n


cdef inline void sort_branches(Automaton* a, state_t s, Branch* buffer) noexcept nogil:
    """Chain the further transitions of `s` with the most frequent first."""
    cdef int64_t n = read_branches(a, s, buffer), i
    if n < 2:
        return
    qsort(buffer, n, sizeof(Branch), by_count)
    branch_cell(a, s)[0] = buffer[0].token
    for i in range(n):
        find(&a.branches, s, buffer[i].token).next_branch = (
            buffer[i + 1].token if i + 1 < n else NO_TOKEN
        )


cdef inline int sort_all_branches(Automaton* a) except -1 nogil:
    """No state branches into more tokens than the root does."""
    cdef Branch* buffer = <Branch*>malloc((a.root.used + 1) * sizeof(Branch))
    cdef int64_t i
    if buffer == NULL:
        with gil:
            raise MemoryError(f"no memory to sort {a.root.used} transitions")
    for i in range(1, a.n + 1):
        sort_branches(a, <state_t>i, buffer)
    for i in range(a.clone_count):
        sort_branches(a, ~<state_t>i, buffer)
    free(buffer)
    return 0


# -- branching drafts ------------------------------------------------------------------------------

cdef struct Candidate:
    double prob
    state_t state
    token_t token
    int32_t parent
    float rate


cdef inline bint better(const Candidate* x, const Candidate* y) noexcept nogil:
    """Probable first; ties by parent and token, so that equal texts give equal drafts."""
    if x.prob != y.prob:
        return x.prob > y.prob
    if x.parent != y.parent:
        return x.parent < y.parent
    return x.token < y.token


cdef inline void sift_up(Candidate* heap, int64_t i) noexcept nogil:
    cdef Candidate moved = heap[i]
    while i > 0 and better(&moved, &heap[(i - 1) // 2]):
        heap[i] = heap[(i - 1) // 2]
        i = (i - 1) // 2
    heap[i] = moved


cdef inline void sift_down(Candidate* heap, int64_t n) noexcept nogil:
    """Restore order after the last element has replaced the top."""
    cdef Candidate moved = heap[0]
    cdef int64_t i = 0, child = 1
    while child < n:
        if child + 1 < n and better(&heap[child + 1], &heap[child]):
            child += 1
        if not better(&heap[child], &moved):
            break
        heap[i] = heap[child]
        i, child = child, 2 * child + 1
    heap[i] = moved


cdef struct Frontier:
    Candidate* heap
    int64_t n
    int64_t max_children
    double min_prob


cdef inline void offer(
    const Automaton* a, Frontier* f, const Candidate* parent, int32_t index,
    token_t token, state_t target,
) noexcept nogil:
    cdef Candidate c
    c.rate = <float>count_of(a, target) / count_of(a, parent.state)
    c.prob = parent.prob * c.rate
    if c.prob < f.min_prob:
        return
    c.state, c.token, c.parent = target, token, index
    f.heap[f.n] = c
    sift_up(f.heap, f.n)
    f.n += 1


cdef inline void expand(
    const Automaton* a, Frontier* f, const Candidate* parent, int32_t index
) noexcept nogil:
    """Offer the most frequent transitions: the sorted branches, with the first one merged in."""
    cdef state_t s = parent.state
    cdef token_t token = branch_cell(a, s)[0]
    cdef const Slot* slot
    cdef int32_t first = 0
    cdef int64_t left = f.max_children
    if first_token(a, s) != SEPARATOR:
        first = count_of(a, first_target(a, s))
    while left > 0 and token != NO_TOKEN:
        slot = find(&a.branches, s, token)
        if first < count_of(a, slot.target):
            offer(a, f, parent, index, token, slot.target)
            token = slot.next_branch
        else:
            offer(a, f, parent, index, first_token(a, s), first_target(a, s))
            first = 0
        left -= 1
    if left > 0 and first > 0:
        offer(a, f, parent, index, first_token(a, s), first_target(a, s))


cdef inline int64_t best_first(
    const Automaton* a, state_t s, Frontier* f, int64_t limit,
    int32_t* tokens, int32_t* parents, float* rates, int32_t* counts,
) noexcept nogil:
    cdef Candidate top
    cdef int64_t n = 0
    top.state, top.prob = s, 1.0
    expand(a, f, &top, -1)
    while f.n > 0 and n < limit:
        top = f.heap[0]
        f.n -= 1
        f.heap[0] = f.heap[f.n]
        sift_down(f.heap, f.n)
        tokens[n], parents[n], rates[n] = top.token, top.parent, top.rate
        counts[n] = count_of(a, top.state)
        expand(a, f, &top, <int32_t>n)
        n += 1
    return n
