# Occurrences of the states of a finished suffix automaton.

cdef enum:
    FINISHED = -1


cdef int32_t* cell_of(int32_t* positions, int32_t* clones, state_t s) noexcept nogil:
    return &positions[s] if s >= 0 else &clones[~s]


cdef void fold_up(
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


cdef void accumulate(Automaton* a, int32_t* open_positions, int32_t* open_clones) noexcept nogil:
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


cdef void release_counts(Automaton* a) noexcept nogil:
    free(a.position_counts)
    free(a.clone_counts)
    a.position_counts = a.clone_counts = NULL


cdef int count_occurrences(Automaton* a) except -1 nogil:
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


cdef int by_count(const void* x, const void* y) noexcept nogil:
    """Frequent first; ties by token, so that equal texts give equal drafts."""
    cdef const Branch* b = <const Branch*>x
    cdef const Branch* c = <const Branch*>y
    if b.count != c.count:
        return -1 if b.count > c.count else 1
    return (b.token > c.token) - (b.token < c.token)


cdef int64_t read_branches(const Automaton* a, state_t s, Branch* out) noexcept nogil:
    cdef token_t token = branch_cell(a, s)[0]
    cdef const Slot* slot
    cdef int64_t n = 0
    while token != NO_TOKEN:
        slot = find(&a.branches, s, token)
        out[n].token, out[n].count = token, count_of(a, slot.target)
        token = slot.next_branch
        n += 1
    return n


cdef void sort_branches(Automaton* a, state_t s, Branch* buffer) noexcept nogil:
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


cdef int sort_all_branches(Automaton* a) except -1 nogil:
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
