# Files in blocks, each of which is compared with its checksum when it is first read.
#
# A block that was found sound is not compared again. Of a damaged one nothing is read: the index says
# so from then on, and whoever searched it learns that.

cdef extern from *:
    """
    #if defined(__GNUC__) || defined(__clang__)
    #define hfra_is_known(state) __builtin_expect(__atomic_load_n(state, __ATOMIC_RELAXED) == 1, 1)
    #define hfra_load(state) __atomic_load_n(state, __ATOMIC_ACQUIRE)
    #define hfra_store(state, value) __atomic_store_n(state, value, __ATOMIC_RELEASE)
    #else
    #define hfra_is_known(state) (*(const volatile unsigned char*)(state) == 1)
    #define hfra_load(state) (*(const volatile unsigned char*)(state))
    #define hfra_store(state, value) (*(volatile unsigned char*)(state) = (value))
    #endif
    """
    bint is_known "hfra_is_known"(const uint8_t* state) noexcept nogil
    uint8_t load "hfra_load"(const uint8_t* state) noexcept nogil
    void store "hfra_store"(uint8_t* state, uint8_t value) noexcept nogil

cdef enum:
    BLOCK_BITS = 12  # log2 of a block's entries: more cost the first look, fewer the later ones
    SOUND = 1        # states of blocks; 0: not read yet
    DAMAGED = 2

cdef struct Blocks:
    const uint8_t* bytes
    int64_t size              # bytes
    int64_t block_bytes       # every block's but the last one's
    const uint64_t* sums      # [blocks]
    uint8_t* states           # [blocks]
    uint8_t* damaged          # whether any block of the index is
    bint (*examine)(const Blocks* blocks, int64_t block) noexcept nogil  # called by address, so never inlined

cdef int64_t block_count(const Blocks* blocks) noexcept nogil:
    return (blocks.size + blocks.block_bytes - 1) // blocks.block_bytes

@cython.overflowcheck(False)
cdef inline void stir(uint64_t* found, uint64_t word) noexcept nogil:
    """A bijection of either for the other, so that a change of one word alone is always seen."""
    found[0] = (found[0] ^ word) * <uint64_t>0x9E3779B97F4A7C15
    found[0] ^= found[0] >> 32

cdef uint64_t checksum(const uint8_t* data, int64_t size) noexcept nogil:
    """A block's. Processors work on the four lanes at a time."""
    cdef uint64_t[4] lanes, words
    cdef uint64_t found = size
    cdef int32_t i
    memset(lanes, 0, sizeof(lanes))
    for _ in range(size // 32):
        memcpy(words, data, 32)
        for i in range(4):
            stir(&lanes[i], words[i])
        data += 32
    memset(words, 0, sizeof(words))
    memcpy(words, data, size % 32)
    for i in range(4):
        stir(&lanes[i], words[i])
        stir(&found, lanes[i])
    return found

cdef uint64_t sum_of(const Blocks* blocks, int64_t block) noexcept nogil:
    cdef int64_t start = block * blocks.block_bytes
    return checksum(blocks.bytes + start, min(blocks.block_bytes, blocks.size - start))

cdef bint examine(const Blocks* blocks, int64_t block) noexcept nogil:
    """Whether a block that is not known to be sound is."""
    if sum_of(blocks, block) == blocks.sums[block]:
        store(blocks.states + block, SOUND)
        return True
    store(blocks.states + block, DAMAGED)
    store(blocks.damaged, 1)
    return False

cdef inline bint is_sound(const Blocks* blocks, int64_t entry) noexcept nogil:
    """Whether the block of an entry may be read."""
    cdef int64_t block = entry >> BLOCK_BITS
    return is_known(blocks.states + block) or blocks.examine(blocks, block)
