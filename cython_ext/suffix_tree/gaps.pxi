# How texts went on after two tokens and any third: what the trie, which has whole contexts only,
# cannot tell. A table of at most GAPS_LIMIT entries counts the most frequent continuations of each
# such pair. Where pairs contend for a place, the one that was seen more often keeps it.

cdef enum:
    GAPS_AT_FIRST = 256
    GAPS_LIMIT = 16384  # of 32 bytes
    MOST_COUNTED = 60000


@cython.overflowcheck(False)
cdef inline uint32_t gap_tag(token_t second, token_t third) noexcept nogil:
    """Of a pair, not 0; `second` and `third` from the end of the text."""
    cdef uint64_t h = (<uint64_t>second << 32 | <uint32_t>third) * 0x9E3779B97F4A7C15ULL
    h ^= h >> 32
    h *= 0xD6E8FEB86659FD93ULL
    return <uint32_t>(h >> 32) | 1

cdef inline Gap* gap_home(Store* s, uint32_t tag, int32_t which) noexcept nogil:
    """One of the two entries, side by side, that a pair may have."""
    return &s.gaps[((tag >> 1) & <uint32_t>(s.gap_count - 1)) ^ <uint32_t>which]

cdef inline Gap* gap_find(Store* s, uint32_t tag) noexcept nogil:
    cdef int32_t which
    for which in range(2):
        if gap_home(s, tag, which).tag == tag:
            return gap_home(s, tag, which)
    return NULL

cdef inline Gap* weaker_home(Store* s, uint32_t tag) noexcept nogil:
    cdef Gap* first = gap_home(s, tag, 0)
    cdef Gap* other = gap_home(s, tag, 1)
    return other if other.total < first.total else first

# 1: done or not to be done, -1: no memory. Where a larger table does not fit under the byte limit,
# the old one stays.
cdef int gaps_reserve(Store* s) noexcept nogil:
    cdef int32_t old_count = s.gap_count, i
    cdef int32_t count = max(2 * old_count, <int32_t>GAPS_AT_FIRST)
    cdef Gap* old = s.gaps
    cdef Gap* gap
    if 2 * s.gaps_used < old_count or count > GAPS_LIMIT or not fits(s, count * <int64_t>sizeof(Gap)):
        return 1
    gap = <Gap*>calloc(count, sizeof(Gap))
    if gap == NULL:
        return -1
    s.gaps, s.gap_count, s.gaps_used = gap, count, 0
    for i in range(old_count):
        gap = weaker_home(s, old[i].tag)
        if gap.total < old[i].total:
            s.gaps_used += gap.tag == 0
            gap[0] = old[i]
    free(old)
    return 1

cdef inline int32_t names_of(const Gap* gap) noexcept nogil:
    cdef int32_t k = 0
    while k < GAP_NAMES and gap.counts[k]:
        k += 1
    return k

cdef Gap* gap_for(Store* s, uint32_t tag) noexcept nogil:
    """The entry of a pair; NULL where others keep the places, each time at the price of a count."""
    cdef Gap* gap = gap_find(s, tag)
    if gap != NULL:
        return gap
    gap = weaker_home(s, tag)
    if gap.total > 1:
        gap.total -= 1
        if gap.counts[0]:
            gap.counts[names_of(gap) - 1] -= 1
        return NULL
    s.gaps_used += gap.tag == 0
    memset(gap, 0, sizeof(Gap))
    gap.tag = tag
    return gap

cdef inline void swap_names(Gap* gap, int32_t k) noexcept nogil:
    cdef token_t token = gap.tokens[k]
    cdef uint16_t count = gap.counts[k]
    gap.tokens[k], gap.counts[k] = gap.tokens[k - 1], gap.counts[k - 1]
    gap.tokens[k - 1], gap.counts[k - 1] = token, count

cdef void count_gap(Gap* gap, token_t token) noexcept nogil:
    cdef int32_t k = 0
    if gap.total >= MOST_COUNTED:
        return
    gap.total += 1
    while k < GAP_NAMES - 1 and gap.counts[k] and gap.tokens[k] != token:
        k += 1
    if gap.tokens[k] != token and gap.counts[k] > 1:
        gap.counts[k] -= 1
        gap.latest = GAP_NAMES
        return
    if gap.tokens[k] != token:
        gap.tokens[k], gap.counts[k] = token, 0
    gap.counts[k] += 1
    while k and gap.counts[k] > gap.counts[k - 1]:
        swap_names(gap, k)
        k -= 1
    gap.latest = k

cdef void note_gap(Store* s, int32_t sequence, token_t token) noexcept nogil:
    """Count that a sequence, to which it is not appended yet, goes on with a token."""
    cdef Sequence* q = sequence_at(s, sequence)
    cdef int32_t position
    cdef Gap* gap
    if q.length < 3 or not s.gap_count:
        return
    position = (q.last_page << PAGE_BITS) + (q.length - 1) % PAGE_TOKENS
    position = backward(s, position, 1)
    gap = gap_for(s, gap_tag(token_at(s, position), token_at(s, backward(s, position, 1))))
    if gap != NULL:
        count_gap(gap, token)

cdef void forget_gap(Store* s, token_t third, token_t second, token_t token) noexcept nogil:
    cdef Gap* gap = gap_find(s, gap_tag(second, third)) if s.gap_count else NULL
    cdef int32_t k, named = 0
    if gap == NULL:
        return
    for k in range(GAP_NAMES):
        named += gap.counts[k]
    gap.latest = GAP_NAMES
    for k in range(names_of(gap)):
        if gap.tokens[k] == token:
            gap.total -= 1
            gap.counts[k] -= 1
            while k < GAP_NAMES - 1 and gap.counts[k + 1] > gap.counts[k]:
                k += 1
                swap_names(gap, k)
            return
    gap.total -= gap.total > named  # one of those that are not named

cdef void forget_gaps(Store* s, int32_t sequence) noexcept nogil:
    """Take back what a sequence has counted."""
    cdef Sequence* q = sequence_at(s, sequence)
    cdef int32_t position, i
    cdef token_t[4] last
    if q.length < 4:
        return
    position = q.first_page << PAGE_BITS
    for i in range(q.length):
        last[i & 3] = token_at(s, position)
        if i > 2:
            forget_gap(s, last[(i - 3) & 3], last[(i - 2) & 3], last[i & 3])
        if i + 1 < q.length:
            position = forward(s, position, 1)

cdef inline const Gap* gap_after(Store* s, token_t second, token_t third) noexcept nogil:
    """The entry of a pair; NULL where there is none, or fewer than three tokens."""
    return gap_find(s, gap_tag(second, third)) if s.gap_count and third >= 0 else NULL

cdef inline void fetch_gap(Store* s, token_t second, token_t third) noexcept nogil:
    """Ask for the entry of a pair."""
    if s.gap_count:
        prefetch(gap_home(s, gap_tag(second, third), 0))
