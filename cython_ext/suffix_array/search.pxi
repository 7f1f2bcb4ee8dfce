# Searching the suffixes of one shard, many searches at a time.
#
# A comparison reads two places, in the suffix array and in the text, that no cache holds: half a
# microsecond each time for a large corpus. Memory answers some thirty such reads in little more than
# the time of one, so all loops here first ask for what they will read and then read it.

cdef enum:
    LANES = 64   # codes that are looked for at a time
    POINTS = 32  # comparisons at little more than the price of one

cdef struct Text:             # codes: token id + 1, and 0 after every document
    const uint8_t* codes      # [length * width], each big-endian in `width` bytes
    int64_t length
    int32_t width
    Blocks blocks

cdef struct Shard:
    Text text
    const uint32_t* suffixes  # [suffix_count], positions of codes, in the order of their suffixes
    const uint32_t* starts    # [bucket_count + 1], first rank of every bucket of first codes
    int64_t suffix_count
    int64_t bucket_count
    int32_t bucket_shift
    Blocks suffix_blocks
    Blocks start_blocks

cdef struct Interval:         # ranks [low, high) of one shard's suffixes
    int64_t low
    int64_t high

cdef struct Probe:            # a search for a rank in [low, high]; done when they are equal
    int64_t low
    int64_t high
    uint32_t code             # sought: the first rank whose code ...
    int32_t offset            # ... so many places into the suffix is at least `code`

cdef struct Sample:           # the code of one suffix
    const Shard* shard
    int64_t rank
    int64_t place
    int32_t offset            # where in the suffix
    uint32_t code

cdef inline int64_t suffixes_in(const Interval* intervals, int32_t shards) noexcept nogil:
    cdef int64_t count = 0
    cdef int32_t s
    for s in range(shards):
        count += intervals[s].high - intervals[s].low
    return count

cdef inline uint32_t code_at(const Text* text, int64_t position) noexcept nogil:
    """The code at a position; 0, the end of a document, outside the text and where it is damaged."""
    cdef const uint8_t* byte
    if not (0 <= position < text.length and is_sound(&text.blocks, position)):
        return 0
    byte = text.codes + position * text.width
    if text.width == 3:
        return <uint32_t>byte[0] << 16 | <uint32_t>byte[1] << 8 | byte[2]
    if text.width == 2:
        return <uint32_t>byte[0] << 8 | byte[1]
    if text.width == 4:
        return (
            <uint32_t>byte[0] << 24 | <uint32_t>byte[1] << 16 | <uint32_t>byte[2] << 8 | byte[3]
        )
    return byte[0]

cdef inline void ask_rank(const Shard* shard, int64_t rank) noexcept nogil:
    """Prefetch the position of the suffix of a rank."""
    if 0 <= rank < shard.suffix_count:
        prefetch(shard.suffixes + rank)

cdef inline int64_t ask_place(const Shard* shard, int64_t rank, int32_t offset) noexcept nogil:
    """The place `offset` into the suffix of a rank, prefetched; -1 for a rank that is none, or that
    is damaged."""
    cdef int64_t place
    if not (0 <= rank < shard.suffix_count and is_sound(&shard.suffix_blocks, rank)):
        return -1
    place = <int64_t>shard.suffixes[rank] + offset
    if place < shard.text.length:
        prefetch(shard.text.codes + place * shard.text.width)
    return place

cdef inline int64_t rank_of(const Probe* probe, int32_t point, int32_t points) noexcept nogil:
    """The rank of one of `points` comparisons that cut a probe's interval evenly."""
    return probe.low + (probe.high - probe.low) * (point + 1) // (points + 1)

cdef inline Interval bucket_of(const Shard* shard, uint32_t code) noexcept nogil:
    """The suffixes whose first code shares an entry of the bucket table with `code`."""
    cdef int64_t bucket = code >> shard.bucket_shift
    cdef Interval out
    out.low = out.high = 0
    if bucket >= shard.bucket_count:
        return out
    if not (is_sound(&shard.start_blocks, bucket) and is_sound(&shard.start_blocks, bucket + 1)):
        return out
    out.low = min(<int64_t>shard.starts[bucket], shard.suffix_count)
    out.high = max(out.low, min(<int64_t>shard.starts[bucket + 1], shard.suffix_count))
    return out

cdef void compare(const Shard* shard, Probe* probe, const int64_t* places, int32_t points) noexcept nogil:
    """Narrow a probe to what lies between two neighbouring points."""
    cdef Probe before = probe[0]
    cdef int32_t j
    for j in range(points):
        if code_at(&shard.text, places[j]) < before.code:
            probe.low = rank_of(&before, j, points) + 1
        else:
            probe.high = rank_of(&before, j, points)
            return

cdef void search_together(const Shard* shard, Probe* probes, int32_t count) noexcept nogil:
    """Finish up to 2 * LANES searches together, each by more points the fewer they are."""
    cdef int32_t[2 * LANES] unfinished
    cdef int64_t[2 * LANES] places
    cdef int32_t i, j, points, left = 0
    cdef Probe* probe
    for i in range(count):
        if probes[i].low < probes[i].high:
            unfinished[left] = i
            left += 1
    while left > 0:
        count = left
        points = max(POINTS // count, 1)
        for i in range(count):
            probe = &probes[unfinished[i]]
            for j in range(points):
                ask_rank(shard, rank_of(probe, j, points))
        for i in range(count):
            probe = &probes[unfinished[i]]
            for j in range(points):
                places[i * points + j] = ask_place(shard, rank_of(probe, j, points), probe.offset)
        left = 0
        for i in range(count):
            probe = &probes[unfinished[i]]
            compare(shard, probe, places + i * points, points)
            unfinished[left] = unfinished[i]
            left += probe.low < probe.high
