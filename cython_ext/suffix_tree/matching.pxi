# Where contexts lead in the trie.


cdef bint step(Store* s, Place* at, token_t token) noexcept nogil:
    """Move one token down, if the trie goes on so."""
    cdef int32_t item
    if at.depth < item_depth(s, at.item):
        if label_token(s, at.item, at.depth + 1) != token:
            return False
    elif at.item < 0:
        return False
    else:
        item = child_of(s, at.item, token)
        if item == NO_ITEM:
            return False
        at.item = item
    at.depth += 1
    return True

cdef inline int32_t match_context(Store* s, const token_t[::1] context, Place* matches) noexcept nogil:
    """Fill `matches[1 ..]` with where the last tokens lead; returns the longest length that matches."""
    cdef Py_ssize_t n = context.shape[0], i
    cdef int32_t length
    for length in range(1, <int32_t>min(n, <Py_ssize_t>s.max_depth) + 1):
        matches[length].item = ROOT
        matches[length].depth = 0
        for i in range(n - length, n):
            if not step(s, &matches[length], context[i]):
                return length - 1
    return <int32_t>min(n, <Py_ssize_t>s.max_depth)

cdef int32_t match_sequence(Store* s, int32_t sequence, Place* matches) noexcept nogil:
    """The same for the end of a sequence: its pending suffixes are where they lead.

    Longer ones occur nowhere else and have no continuation.
    """
    cdef Sequence* q = sequence_at(s, sequence)
    cdef int32_t length, longest = q.length - q.pending, position
    if longest > 0:
        position = (q.last_page << PAGE_BITS) + (q.length - 1) % PAGE_TOKENS
    for length in range(1, longest + 1):
        matches[length].item = ~link_at(s, position).node
        matches[length].depth = length
        if length < longest:
            position = backward(s, position, 1)
    return longest
