# Child table: (node, first token) to item, open addressing. A node with one child, the root apart,
# is not in it: its child hangs in its list alone, and may be given another first token freely.


# Murmur3's finaliser, a bijection: children of one node have different tags, so that an entry of
# equal tag and parent is the one looked for.
@cython.overflowcheck(False)
cdef inline uint32_t scramble(uint32_t h) noexcept nogil:
    h = (h ^ (h >> 16)) * <uint32_t>0x85EBCA6B
    h = (h ^ (h >> 13)) * <uint32_t>0xC2B2AE35
    return h ^ (h >> 16)

@cython.overflowcheck(False)
cdef inline uint32_t tag_of(int32_t parent, token_t token) noexcept nogil:
    return scramble(<uint32_t>token + scramble(<uint32_t>parent))

cdef inline int64_t home_of(Store* s, uint32_t tag) noexcept nogil:
    return <int64_t>((<uint64_t>tag * <uint64_t>s.slot_count) >> 32)

cdef inline int64_t after(Store* s, int64_t slot) noexcept nogil:
    slot += 1
    return 0 if slot == s.slot_count else slot

cdef inline void slot_fill(Store* s, uint32_t tag, int32_t item) noexcept nogil:
    cdef int64_t i = home_of(s, tag)
    while s.slots[i].item != NO_ITEM:
        i = after(s, i)
    s.slots[i].tag = tag
    s.slots[i].item = item

# 1: room for `need` more entries below three quarters full, 0: the byte limit, -1: no memory.
cdef int table_reserve(Store* s, int64_t need) noexcept nogil:
    cdef int64_t old_count = s.slot_count, new_count, i
    cdef Slot* old = s.slots
    cdef Slot* slots
    if (s.slots_used + need) * 4 <= old_count * 3:
        return 1
    new_count = old_count + old_count // 4
    if (s.slots_used + need) * 4 > new_count * 3:
        new_count = (s.slots_used + need) * 4 // 3 + 1
    # The old and the new table stand side by side while entries move.
    if not fits(s, new_count * <int64_t>sizeof(Slot)):
        return 0
    slots = <Slot*>realloc(NULL, <size_t>new_count * sizeof(Slot))
    if slots == NULL:
        return -1
    for i in range(new_count):
        slots[i].item = NO_ITEM
    s.slots = slots
    s.slot_count = new_count
    for i in range(old_count):
        if old[i].item != NO_ITEM:
            slot_fill(s, old[i].tag, old[i].item)
    free(old)
    return 1

cdef inline void table_add(Store* s, int32_t parent, token_t token, int32_t item) noexcept nogil:
    slot_fill(s, tag_of(parent, token), item)
    s.slots_used += 1

cdef inline int32_t table_find(Store* s, int32_t parent, token_t token) noexcept nogil:
    cdef uint32_t tag = tag_of(parent, token)
    cdef int64_t i = home_of(s, tag)
    cdef int32_t item
    while True:
        item = s.slots[i].item
        if item == NO_ITEM:
            return NO_ITEM
        if s.slots[i].tag == tag and item_parent(s, item) == parent:
            return item
        i = after(s, i)

cdef inline int64_t slot_of(Store* s, uint32_t tag, int32_t item) noexcept nogil:
    cdef int64_t i = home_of(s, tag)
    while s.slots[i].item != item:
        i = after(s, i)
    return i

cdef inline void table_replace(
    Store* s, int32_t parent, token_t token, int32_t item, int32_t by
) noexcept nogil:
    s.slots[slot_of(s, tag_of(parent, token), item)].item = by

# Entries behind the gap move up where their probe would meet it, so that no gravestones are needed.
cdef inline void table_remove(Store* s, int32_t parent, token_t token, int32_t item) noexcept nogil:
    cdef int64_t gap = slot_of(s, tag_of(parent, token), item), i = gap, home
    while True:
        i = after(s, i)
        if s.slots[i].item == NO_ITEM:
            break
        home = home_of(s, s.slots[i].tag)
        if (home <= gap < i) or (i < home <= gap) or (gap < i < home):
            s.slots[gap] = s.slots[i]
            gap = i
    s.slots[gap].item = NO_ITEM
    s.slots_used -= 1
