# cython: cdivision=True
# Transitions of automaton states in one open-addressing table: linear probing, no deletion.
cimport cython
from libc.stdint cimport uint32_t, uint64_t

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
