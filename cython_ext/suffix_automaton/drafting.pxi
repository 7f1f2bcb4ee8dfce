# Matching a text against the suffix automaton, and what is drafted from the match.

cdef struct Match:
    state_t state
    int32_t length

cdef void normalise(const Automaton* a, Match* m) noexcept nogil:
    """Splits since the last step may have moved the matched string to a suffix link."""
    while m.state != ROOT and m.length <= length_of(a, link_of(a, m.state)):
        m.state = link_of(a, m.state)

cdef void advance(const Automaton* a, Match* m, token_t token) noexcept nogil:
    cdef state_t q
    normalise(a, m)
    q = step(a, m.state, token)
    while q == MISSING and m.state != ROOT:
        m.state = link_of(a, m.state)
        m.length = length_of(a, m.state)
        q = step(a, m.state, token)
    if q != MISSING:
        m.state = q
        m.length += 1

cdef int64_t following(const Automaton* a, int64_t end, int64_t limit) noexcept nogil:
    """How many tokens, at most `limit`, stand after `end` in its document."""
    cdef int64_t i = 0
    while i < limit and a.positions[end + 1 + i].token != SEPARATOR:
        i += 1
    return i

cdef int64_t continuation(const Automaton* a, Match m, int64_t limit, int64_t* end) noexcept nogil:
    """Set `end` to the occurrence to draft from; returns how many tokens follow it.

    It is the match's first one, or, where fewer than `limit` tokens follow that, the first one of the
    longest shorter suffix behind which more do.
    """
    cdef state_t s = m.state
    cdef int64_t available, best = 0
    while s != ROOT:
        available = following(a, earliest_end(a, s), limit)
        if available > best:
            end[0], best = earliest_end(a, s), available
        if best == limit:
            break
        s = link_of(a, s)
    return best
