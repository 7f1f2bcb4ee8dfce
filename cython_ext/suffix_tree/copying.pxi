# Where a text copies from what stands before it, across what it changes on the way.
#
# A copy is a place in the text that moves along with what is written. Where the two part, it waits
# until the text comes back to some place near by: after tokens put in, left out, or put in for others.

cdef enum:
    PATIENCE = 64   # tokens after which a copy that the text has left is given up
    BEHIND = 8      # tokens before the place where the text left it, and
    REACH = 64      # beyond the place where it would be by now, at which it may be met again


cdef inline int32_t shifted(Store* s, int32_t position, int32_t steps) noexcept nogil:
    """The position so many tokens on in its sequence, NIL beyond the ends."""
    cdef int32_t start = start_of(s, position) + steps
    if start < 0 or start >= sequence_at(s, page_of(s, position).owner).length:
        return NIL
    return forward(s, position, steps) if steps >= 0 else backward(s, position, -steps)

cdef inline int32_t next_position(Store* s, Place at) noexcept nogil:
    """Where the latest continuation of a place that goes on stands."""
    if at.depth < item_depth(s, at.item):
        return label_end(s, at.item, at.depth + 1)
    return shifted(s, node_at(s, at.item).end, 1)

cdef void adopt_copy(Store* s, Copy* c, const Context* longest) noexcept nogil:
    """Copy from where the longest context occurred last, if that says more."""
    cdef int32_t least = 3
    if c.next != NIL:
        least = max(c.length + 1, 4)
    elif c.left != NIL:
        least = 5
    if longest.longest >= least:
        c.next, c.length = next_position(s, longest.place), longest.longest
        c.left = NIL
        c.since = c.breaks = 0

cdef void come_back(Store* s, Copy* c, token_t token) noexcept nogil:
    """Go on after the last two tokens if they stand near where the copy would be by now."""
    cdef int32_t start = start_of(s, c.left), by_now = c.since - 1, least = REACH, steps, away
    cdef int32_t first = max(-BEHIND, -start), position = shifted(s, c.left, first)
    cdef int32_t beyond = min(by_now + REACH, sequence_at(s, page_of(s, c.left).owner).length - start)
    cdef token_t before = -1, here
    for steps in range(first, beyond):
        here = token_at(s, position)
        if here == token and before == c.last[0]:
            away = steps - by_now if steps > by_now else by_now - steps
            if away < least:
                least, c.next, c.length = away, shifted(s, position, 1), 2
        before = here
        if steps + 1 < beyond:
            position = forward(s, position, 1)

cdef void leave_copy(Copy* c) noexcept nogil:
    """The text goes on otherwise. A place that it had hardly come back to is not where it left."""
    c.breaks = min(c.breaks + 1, 3)
    if c.length > 2 or c.left == NIL or c.since > 40:
        c.left, c.since = c.next, 0
    c.next, c.length = NIL, 0

cdef void step_copy(Store* s, Copy* c, token_t token) noexcept nogil:
    """The copy one token on."""
    if c.next != NIL and token_at(s, c.next) == token:
        c.next = shifted(s, c.next, 1)
        c.length += 1
        if c.length > 24:
            c.breaks = 0 if c.length > 64 else min(c.breaks, 1)
    else:
        if c.next != NIL:
            leave_copy(c)
        c.since += 1
        if c.since > PATIENCE:
            c.left = NIL
        if c.left != NIL and c.since > 1:
            come_back(s, c, token)

cdef inline int32_t length_bucket(int32_t length) noexcept nogil:
    return ((length > 2) + (length > 4) + (length > 8) + (length > 16) + (length > 32) + (length > 80)
            + (length > 250))

cdef inline int32_t copy_state(const Copy* c) noexcept nogil:
    """0: there is none, 1: the text has left it, 2: it goes on."""
    return 2 if c.next != NIL else c.left != NIL

cdef void name_copies(Store* s, const Copy* c, CopyNames* out) noexcept nogil:
    """What follows if the copy goes on, or if it goes on now where the text has left it."""
    out.tokens[0] = out.tokens[1] = -1
    if c.next != NIL:
        out.tokens[0] = token_at(s, c.next)
        out.kinds[0] = length_bucket(c.length) * 4 + c.breaks
    elif c.left != NIL:
        out.tokens[1] = token_at(s, c.left)
        out.kinds[1] = min(c.since, 8) * 2 + (c.breaks > 1)
