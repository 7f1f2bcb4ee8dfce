# Searching the suffixes of one shard, many searches at a time; see search.pxd.


cdef void compare(
    const Shard* shard, Probe* probe, const int64_t* places, int32_t points
) noexcept nogil:
    """Narrow a probe to what lies between two neighbouring points."""
    cdef Probe before = probe[0]
    cdef int32_t j
    for j in range(points):
        if code_at(&shard.text, places[j]) < before.code:
            probe.low = rank_of(&before, j, points) + 1
        else:
            probe.high = rank_of(&before, j, points)
            return


cdef void settle(const Shard* shard, Probe* probes, int32_t count) noexcept nogil:
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
                places[i * points + j] = ask_place(
                    shard, rank_of(probe, j, points), probe.offset
                )
        left = 0
        for i in range(count):
            probe = &probes[unfinished[i]]
            compare(shard, probe, places + i * points, points)
            unfinished[left] = unfinished[i]
            left += probe.low < probe.high
