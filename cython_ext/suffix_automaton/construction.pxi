# Building the suffix automaton: tables that grow, then states that are appended and split.


cdef int allocate_slots(Table* t, int32_t bits) except -1 nogil:
    cdef int64_t capacity = <int64_t>1 << bits
    cdef Slot* slots = <Slot*>malloc(capacity * sizeof(Slot))
    if slots == NULL:
        with gil:
            raise MemoryError(f"no memory for a table of {capacity} transitions")
    memset(slots, 0xFF, capacity * sizeof(Slot))  # every token becomes NO_TOKEN
    t.slots, t.capacity, t.shift = slots, capacity, 64 - bits
    return 0


cdef int grow_table(Table* t) except -1 nogil:
    cdef Slot* old = t.slots
    cdef int64_t old_capacity = t.capacity, i
    allocate_slots(t, 65 - t.shift)
    for i in range(old_capacity):
        if old[i].token != NO_TOKEN:
            find(t, old[i].state, old[i].token)[0] = old[i]
    free(old)
    return 0


cdef int insert(
    Table* t, state_t state, token_t token, state_t target, token_t next_branch
) except -1 nogil:
    if 4 * (t.used + 1) > 3 * t.capacity:
        grow_table(t)
    cdef Slot* slot = find(t, state, token)
    slot.state, slot.token = state, token
    slot.target, slot.next_branch = target, next_branch
    t.used += 1
    return 0


cdef int reserve_positions(Automaton* a, int64_t tokens) except -1 nogil:
    """Room for the root, `tokens` positions and the sentinel."""
    if tokens > MAX_POSITIONS:
        with gil:
            raise OverflowError(f"a text is limited to {MAX_POSITIONS} tokens, not {tokens}")
    if tokens + 2 <= a.position_capacity:
        return 0
    cdef Position* grown = <Position*>realloc(a.positions, (tokens + 2) * sizeof(Position))
    if grown == NULL:
        with gil:
            raise MemoryError(f"no memory for a text of {tokens} tokens")
    a.positions, a.position_capacity = grown, tokens + 2
    return 0


cdef int reserve_clones(Automaton* a, int64_t clones) except -1 nogil:
    if clones <= a.clone_capacity:
        return 0
    cdef Clone* grown = <Clone*>realloc(a.clones, clones * sizeof(Clone))
    if grown == NULL:
        with gil:
            raise MemoryError(f"no memory for {clones} cloned states")
    a.clones, a.clone_capacity = grown, clones
    return 0


cdef int64_t grown_capacity(int64_t needed) noexcept nogil:
    """A quarter of slack: appending stays linear, and memory within 1.25 of what is needed."""
    return needed + needed // 4 + FIRST_CAPACITY


cdef int make_room(Automaton* a) except -1 nogil:
    """One append needs at most one position and one clone."""
    if a.n + 3 > a.position_capacity:
        if a.n >= MAX_POSITIONS:
            with gil:
                raise OverflowError(f"a text is limited to {MAX_POSITIONS} tokens")
        reserve_positions(a, min(grown_capacity(a.n + 1), MAX_POSITIONS))
    if a.clone_count >= a.clone_capacity:
        reserve_clones(a, grown_capacity(a.clone_count))
    return 0


cdef int add_transition(
    Automaton* a, state_t s, token_t token, state_t target
) except -1 nogil:
    """A transition beyond the first; the root's all count as such."""
    cdef Table* table = &a.root if s == ROOT else &a.branches
    cdef token_t* branch = branch_cell(a, s)
    insert(table, s, token, target, branch[0])
    branch[0] = token
    return 0


cdef int copy_branches(Automaton* a, state_t source, state_t target) except -1 nogil:
    cdef token_t token = branch_cell(a, source)[0]
    cdef Slot slot
    while token != NO_TOKEN:
        slot = find(&a.branches, source, token)[0]
        add_transition(a, target, token, slot.target)
        token = slot.next_branch
        a.operations += 1
    return 0


cdef state_t* redirectable(Automaton* a, state_t s, token_t token) noexcept nogil:
    """The stored target of s's transition by `token`, or NULL.

    The first transition of a prefix is not stored: it leads to the next prefix, the longest string
    of its state, and a clone only ever takes over shorter ones.
    """
    cdef Slot* slot
    if s != ROOT and first_token(a, s) == token:
        return NULL if s > 0 else &a.clones[~s].target
    slot = find(&a.root if s == ROOT else &a.branches, s, token)
    return NULL if slot.token == NO_TOKEN else &slot.target


cdef int split(Automaton* a, state_t p, token_t token, state_t q, state_t* made) except -1 nogil:
    """Separate from `q` the strings of at most length(p) + 1 tokens, which occur once more."""
    cdef state_t clone = ~<state_t>a.clone_count
    cdef state_t* cell
    cdef Clone* c = &a.clones[a.clone_count]
    c.length, c.link = length_of(a, p) + 1, link_of(a, q)
    c.earliest, c.target = earliest_end(a, q), first_target(a, q)
    c.branch, c.latest = NO_TOKEN, latest_end(a, q)
    a.clone_count += 1
    copy_branches(a, q, clone)
    link_cell(a, q)[0] = clone
    while True:
        cell = redirectable(a, p, token)
        if cell == NULL or cell[0] != q:
            break
        cell[0] = clone
        a.operations += 1
        if p == ROOT:
            break
        p = link_of(a, p)
    made[0] = clone
    return 0


cdef void refresh_latest(Automaton* a) noexcept nogil:
    """Tell the nearest suffixes of the text that they occurred at its end."""
    cdef state_t s = a.positions[a.n].link
    cdef int32_t left = a.refresh
    while s != ROOT and left > 0:
        latest_cell(a, s)[0] = <int32_t>a.n
        s = link_of(a, s)
        left -= 1
        a.operations += 1


cdef void push_position(Automaton* a, token_t token) noexcept nogil:
    """The new prefix, which is its predecessor's first target by merely standing after it."""
    cdef Position* here
    a.n += 1
    here = &a.positions[a.n]
    here.token, here.link = token, ROOT
    here.branch, here.latest = NO_TOKEN, <int32_t>a.n
    a.positions[a.n + 1].token = SEPARATOR


cdef int append(Automaton* a, token_t token) except -1 nogil:
    cdef state_t p, q
    make_room(a)
    refresh_latest(a)
    p = a.positions[a.n].link
    push_position(a, token)
    q = step(a, p, token)
    while q == MISSING:
        add_transition(a, p, token, <state_t>a.n)
        a.operations += 1
        if p == ROOT:
            return 0
        p = link_of(a, p)
        q = step(a, p, token)
    if length_of(a, q) != length_of(a, p) + 1:
        split(a, p, token, q, &q)
    a.positions[a.n].link = q
    return 0
