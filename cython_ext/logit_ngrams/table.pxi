# A table of contexts, and what was likely behind each.

cdef enum:
    WAYS = 8             # places where a context may stand
    FIRST_PLACES = 1024


cdef uint64_t NO_TOKENS = 0x243F6A8885A308D3


cdef struct Row:  # the likeliest tokens behind a place, the likeliest one first, −1 where there are fewer
    token_t ids[TOP]
    float shares[TOP]


cdef inline uint64_t extended(uint64_t key, token_t token) noexcept nogil:
    """The key of a context with one more token in front, never 0; of none, `NO_TOKENS`."""
    key = (key ^ <uint64_t>token) * <uint64_t>0x9E3779B97F4A7C15
    return (key ^ (key >> 31)) | 1


cdef void average(Row* known, const Row* row) noexcept nogil:
    """Let one more occurrence count half."""
    cdef float[2 * TOP] shares
    cdef token_t[2 * TOP] ids
    cdef float share
    cdef token_t token
    cdef int32_t i, j, size = TOP
    for i in range(TOP):
        ids[i], shares[i] = known.ids[i], 0.5 * known.shares[i]
    for j in range(TOP):
        for i in range(TOP):
            if ids[i] == row.ids[j]:
                shares[i] += 0.5 * row.shares[j]
                break
        else:
            ids[size], shares[size] = row.ids[j], 0.5 * row.shares[j]
            size += 1
    for i in range(1, size):  # nearly in order
        token, share, j = ids[i], shares[i], i
        while j > 0 and shares[j - 1] < share:
            ids[j], shares[j] = ids[j - 1], shares[j - 1]
            j -= 1
        ids[j], shares[j] = token, share
    memcpy(known.ids, ids, TOP * sizeof(token_t))
    memcpy(known.shares, shares, TOP * sizeof(float))


cdef class Ngrams:
    """Contexts of one to four tokens, each with the ten likeliest tokens behind it.

    Each occurrence counts half of what the ones before it have left. Takes more memory as it learns, up to a bound;
    then contexts that were met longest ago give way.

    Args:
        max_contexts: a power of 2, at least 8.

    Attributes:
        held: contexts that there is room for.
        used: contexts that there are.
    """

    cdef uint64_t* keys    # [held], 0: an empty place; a context stands in one of WAYS
    cdef uint32_t* stamps  # when each was met last
    cdef Row* rows
    cdef readonly Py_ssize_t held, used
    cdef Py_ssize_t most
    cdef uint32_t now

    def __cinit__(self, Py_ssize_t max_contexts):
        if max_contexts < WAYS or max_contexts & (max_contexts - 1):
            raise ValueError(f"max_contexts: expected a power of 2 from {WAYS} on, got {max_contexts}")
        self.most = max_contexts
        self.make_room(min(max_contexts, <Py_ssize_t>FIRST_PLACES))

    def __dealloc__(self):
        free(self.keys)
        free(self.stamps)
        free(self.rows)

    def __len__(self):
        return self.used

    @property
    def nbytes(self):
        """Bytes that it takes."""
        return self.held * (sizeof(uint64_t) + sizeof(uint32_t) + sizeof(Row))

    cdef int make_room(self, Py_ssize_t places) except -1:
        """Give contexts so many places."""
        cdef uint64_t* keys = self.keys
        cdef uint32_t* stamps = self.stamps
        cdef Row* rows = self.rows
        cdef uint64_t* new_keys = NULL
        cdef uint32_t* new_stamps = NULL
        cdef Row* new_rows
        cdef Py_ssize_t i, held = self.held, place
        try:
            new_keys = <uint64_t*>resized(NULL, places * sizeof(uint64_t))
            new_stamps = <uint32_t*>resized(NULL, places * sizeof(uint32_t))
            new_rows = <Row*>resized(NULL, places * sizeof(Row))
        except MemoryError:
            free(new_keys)
            free(new_stamps)
            raise
        memset(new_keys, 0, places * sizeof(uint64_t))
        self.keys, self.stamps, self.rows, self.held, self.used = new_keys, new_stamps, new_rows, places, 0
        for i in range(held):
            if keys[i]:
                place = self.place_for(keys[i])
                self.keys[place], self.stamps[place], self.rows[place] = keys[i], stamps[i], rows[i]
        free(keys)
        free(stamps)
        free(rows)
        return 0

    cdef inline Py_ssize_t first_place(self, uint64_t key) noexcept:
        return <Py_ssize_t>((key >> 20) & <uint64_t>(self.held // WAYS - 1)) * WAYS

    cdef Row* find(self, uint64_t key) noexcept:
        """What is known behind a context; NULL: nothing."""
        cdef Py_ssize_t first = self.first_place(key), i
        for i in range(first, first + WAYS):
            if self.keys[i] == key:
                return &self.rows[i]
        return NULL

    cdef Py_ssize_t place_for(self, uint64_t key) noexcept:
        """An empty place, or that of the context there that was met longest ago."""
        cdef Py_ssize_t first = self.first_place(key), i, oldest = first
        for i in range(first, first + WAYS):
            if not self.keys[i]:
                self.used += 1
                return i
            if self.now - self.stamps[i] > self.now - self.stamps[oldest]:
                oldest = i
        return oldest

    cdef int learn(self, uint64_t key, const Row* row) except -1:
        """A context has occurred."""
        cdef Row* known = self.find(key)
        cdef Py_ssize_t place
        if known != NULL:
            average(known, row)
            place = known - self.rows
        else:
            if 2 * self.used >= self.held and self.held < self.most:
                self.make_room(2 * self.held)
            place = self.place_for(key)
            self.keys[place], self.rows[place] = key, row[0]
        self.stamps[place] = self.now
        return 0
