# The suffix automaton as C structs, its states, and how it grows.
#
# Text positions are 1-based; position 0 stands for the empty prefix. A state is named by an int32.
# State s >= 0 holds the whole prefix of s tokens: its length, its earliest end and the target of
# its first transition (s, s and s + 1) need no storage. State s < 0 is clone ~s. State 0 is the
# root.

cdef enum:
    ROOT = 0
    SEPARATOR = -1  # equal to no token, so nothing matches or drafts across it
    NO_TOKEN = -1
    FIRST_CAPACITY = 16
    MAX_POSITIONS = 2147483646
    MISSING = -2147483648

# state --token--> target, and the token of the state's next one. Chaining by
# token rather than by slot survives the growth of the table.
cdef struct Slot:
    state_t state
    token_t token      # NO_TOKEN in a free slot
    state_t target
    token_t next_branch

cdef struct Table:
    Slot* slots
    int64_t capacity   # a power of two
    int64_t used
    int32_t shift      # 64 - log2(capacity)

@cython.overflowcheck(False)
cdef inline int64_t home(const Table* t, state_t state, token_t token) noexcept nogil:
    cdef uint64_t key = (<uint64_t><uint32_t>state << 32) | <uint32_t>token
    key = (key ^ (key >> 29)) * <uint64_t>0x9E3779B97F4A7C15
    return <int64_t>(key >> t.shift)

cdef inline Slot* find(const Table* t, state_t state, token_t token) noexcept nogil:
    """The slot of (state, token), or the free slot where it belongs."""
    cdef int64_t i = home(t, state, token)
    while t.slots[i].token != NO_TOKEN and (t.slots[i].token != token or t.slots[i].state != state):
        i = (i + 1) & (t.capacity - 1)
    return &t.slots[i]

cdef struct State:
    state_t link       # suffix link
    token_t branch     # newest token of its further transitions, NO_TOKEN without any

cdef struct Position:
    token_t token      # the token at this position, SEPARATOR after a document
    State state        # the prefix's that ends here

cdef struct Clone:
    int32_t length     # the longest string's of the state
    int32_t earliest   # end of the first occurrence
    state_t target     # where the token after the first occurrence leads
    State state

cdef struct Automaton:
    Position* positions
    Clone* clones
    int64_t n                   # tokens and separators
    int64_t capacity            # tokens; positions 0 .. n + 1 are in use, the last as a sentinel
    int64_t clone_count
    int64_t clone_capacity
    Table root                  # transitions of the root
    Table branches              # transitions of other states beyond their first

cdef inline State* state_at(const Automaton* a, state_t s) noexcept nogil:
    return &a.positions[s].state if s >= 0 else &a.clones[~s].state

cdef inline state_t link_of(const Automaton* a, state_t s) noexcept nogil:
    return state_at(a, s).link

cdef inline int32_t length_of(const Automaton* a, state_t s) noexcept nogil:
    return s if s >= 0 else a.clones[~s].length

cdef inline int32_t earliest_end(const Automaton* a, state_t s) noexcept nogil:
    return s if s >= 0 else a.clones[~s].earliest

cdef inline token_t first_token(const Automaton* a, state_t s) noexcept nogil:
    """The token after the earliest occurrence; SEPARATOR where the text or a document ends."""
    return a.positions[earliest_end(a, s) + 1].token

cdef inline state_t first_target(const Automaton* a, state_t s) noexcept nogil:
    return s + 1 if s >= 0 else a.clones[~s].target

cdef inline state_t step(const Automaton* a, state_t s, token_t token) noexcept nogil:
    """Where `token` leads from `s`, or MISSING."""
    cdef const Table* table = &a.branches
    cdef Slot* slot
    if s == ROOT:
        table = &a.root
    elif first_token(a, s) == token:
        return first_target(a, s)
    elif state_at(a, s).branch == NO_TOKEN:
        return MISSING
    slot = find(table, s, token)
    return MISSING if slot.token == NO_TOKEN else slot.target


# Growing

cdef int allocate_slots(Table* t, int32_t bits) except -1 nogil:
    cdef int64_t capacity = <int64_t>1 << bits
    cdef Slot* slots = <Slot*>resized(NULL, capacity * sizeof(Slot))
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

cdef int insert(Table* t, state_t state, token_t token, state_t target, token_t next_branch) except -1 nogil:
    if 4 * (t.used + 1) > 3 * t.capacity:
        grow_table(t)
    cdef Slot* slot = find(t, state, token)
    slot.state, slot.token = state, token
    slot.target, slot.next_branch = target, next_branch
    t.used += 1
    return 0

cdef int set_capacity(Automaton* a, int64_t tokens, int64_t clones) except -1 nogil:
    """Room for the root, `tokens` positions and the sentinel, and for clones."""
    if tokens > MAX_POSITIONS:
        with gil:
            raise OverflowError(f"a text is limited to {MAX_POSITIONS} tokens, not {tokens}")
    a.positions = <Position*>resized(a.positions, (tokens + 2) * sizeof(Position))
    a.clones = <Clone*>resized(a.clones, clones * sizeof(Clone))
    a.capacity, a.clone_capacity = tokens, clones
    return 0

cdef int64_t grown(int64_t capacity, int64_t used) noexcept nogil:
    """A quarter of slack: appending stays linear, and memory within 1.25 of what is needed."""
    return capacity if used < capacity else used + used // 4 + FIRST_CAPACITY

cdef int make_room(Automaton* a) except -1 nogil:
    """One append needs at most one position and one clone."""
    if a.n >= a.capacity or a.clone_count >= a.clone_capacity:
        set_capacity(
            a,
            max(a.n + 1, min(grown(a.capacity, a.n), <int64_t>MAX_POSITIONS)),
            grown(a.clone_capacity, a.clone_count),
        )
    return 0

cdef int add_transition(Automaton* a, state_t s, token_t token, state_t target) except -1 nogil:
    """A transition beyond the first; the root's all count as such."""
    cdef Table* table = &a.root if s == ROOT else &a.branches
    cdef State* state = state_at(a, s)
    insert(table, s, token, target, state.branch)
    state.branch = token
    return 0

cdef int copy_branches(Automaton* a, state_t source, state_t target) except -1 nogil:
    cdef token_t token = state_at(a, source).branch
    cdef Slot slot
    while token != NO_TOKEN:
        slot = find(&a.branches, source, token)[0]
        add_transition(a, target, token, slot.target)
        token = slot.next_branch
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
    c.length, c.earliest, c.target = length_of(a, p) + 1, earliest_end(a, q), first_target(a, q)
    c.state = state_at(a, q)[0]
    c.state.branch = NO_TOKEN
    a.clone_count += 1
    copy_branches(a, q, clone)
    state_at(a, q).link = clone
    while True:
        cell = redirectable(a, p, token)
        if cell == NULL or cell[0] != q:
            break
        cell[0] = clone
        if p == ROOT:
            break
        p = link_of(a, p)
    made[0] = clone
    return 0

cdef void push_position(Automaton* a, token_t token) noexcept nogil:
    """The new prefix, which is its predecessor's first target by merely standing after it."""
    a.n += 1
    a.positions[a.n] = Position(token, State(ROOT, NO_TOKEN))
    a.positions[a.n + 1].token = SEPARATOR

cdef int append(Automaton* a, token_t token) except -1 nogil:
    cdef state_t p, q
    make_room(a)
    p = a.positions[a.n].state.link
    push_position(a, token)
    q = step(a, p, token)
    while q == MISSING:
        add_transition(a, p, token, <state_t>a.n)
        if p == ROOT:
            return 0
        p = link_of(a, p)
        q = step(a, p, token)
    if length_of(a, q) != length_of(a, p) + 1:
        split(a, p, token, q, &q)
    a.positions[a.n].state.link = q
    return 0
