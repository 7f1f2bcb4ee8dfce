# cython: cdivision=True
# Transitions of automaton states in one open-addressing table: linear probing, no deletion.
cimport cython
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from common.types cimport int32_t, int64_t, state_t, token_t

cdef enum:
    NO_TOKEN = -1


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
    while t.slots[i].token != NO_TOKEN and (
        t.slots[i].token != token or t.slots[i].state != state
    ):
        i = (i + 1) & (t.capacity - 1)
    return &t.slots[i]


cdef inline int allocate_slots(Table* t, int32_t bits) except -1 nogil:
    cdef int64_t capacity = <int64_t>1 << bits
    cdef Slot* slots = <Slot*>malloc(capacity * sizeof(Slot))
    if slots == NULL:
        with gil:
            raise MemoryError(f"no memory for a table of {capacity} transitions")
    memset(slots, 0xFF, capacity * sizeof(Slot))  # every token becomes NO_TOKEN
    t.slots, t.capacity, t.shift = slots, capacity, 64 - bits
    return 0


cdef inline int grow_table(Table* t) except -1 nogil:
    cdef Slot* old = t.slots
    cdef int64_t old_capacity = t.capacity, i
    allocate_slots(t, 65 - t.shift)
    for i in range(old_capacity):
        if old[i].token != NO_TOKEN:
            find(t, old[i].state, old[i].token)[0] = old[i]
    free(old)
    return 0


cdef inline int insert(
    Table* t, state_t state, token_t token, state_t target, token_t next_branch
) except -1 nogil:
    if 4 * (t.used + 1) > 3 * t.capacity:
        grow_table(t)
    cdef Slot* slot = find(t, state, token)
    slot.state, slot.token = state, token
    slot.target, slot.next_branch = target, next_branch
    t.used += 1
    return 0
