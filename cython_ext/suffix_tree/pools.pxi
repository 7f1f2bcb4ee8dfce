# Pools of items of equal size under the store's byte limit.


cdef inline void pool_init(Pool* pool, size_t item_bytes) noexcept nogil:
    pool.data = NULL
    pool.item_bytes = item_bytes
    pool.capacity = pool.used = pool.free_count = 0
    pool.first_free = NIL

# 1: room for `need` more items, 0: the byte limit is in the way, -1: no memory.
cdef int pool_reserve(Store* s, Pool* pool, int32_t need, int64_t limit) noexcept nogil:
    cdef int64_t capacity, more
    cdef char* data
    if pool.capacity - pool_size(pool) >= need:
        return 1
    more = pool.capacity // 4
    if more < need:
        more = need
    capacity = pool.capacity + more
    if capacity > limit:
        return -1
    if not fits(s, more * <int64_t>pool.item_bytes):
        return 0
    data = <char*>realloc(pool.data, <size_t>capacity * pool.item_bytes)
    if data == NULL:
        return -1
    pool.data = data
    pool.capacity = <int32_t>capacity
    return 1

cdef inline int32_t pool_take(Pool* pool) noexcept nogil:
    cdef int32_t index = pool.first_free
    if index == NIL:
        index = pool.used
        pool.used += 1
    else:
        pool.first_free = (<int32_t*>(pool.data + <size_t>index * pool.item_bytes))[0]
        pool.free_count -= 1
    return index

cdef inline void pool_release(Pool* pool, int32_t index) noexcept nogil:
    (<int32_t*>(pool.data + <size_t>index * pool.item_bytes))[0] = pool.first_free
    pool.first_free = index
    pool.free_count += 1
