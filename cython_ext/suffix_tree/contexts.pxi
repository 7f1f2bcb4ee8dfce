# The contexts that end where a text does, in one suffix tree, and how they move along with it.

cdef int32_t[ORDERS] LENGTHS = [1, 2, 3, 4, 5, 6, 8, 11, 16, LONGEST]
# Longest order of at most so many tokens, counted from 1.
cdef int32_t[LONGEST + 1] ORDER_OF = [
    0, 1, 2, 3, 4, 5, 6, 6, 7, 7, 7, 8, 8, 8, 8, 8, 9, 9, 9, 9, 9, 9, 9, 9, 10]


cdef inline bint goes_on(Store* s, Place at) noexcept nogil:
    return at.depth < item_depth(s, at.item) or (at.item >= 0 and node_at(s, at.item).children)

cdef inline void add_context(Store* s, Contexts* contexts, Place place, int32_t shortest, int32_t longest) noexcept nogil:
    """Add a context that is shorter than the ones there are."""
    cdef Context* last
    if contexts.count:
        last = &contexts.at[contexts.count - 1]
        # Contexts of equal count are the same occurrences. The shortest reaches the furthest.
        if item_count(s, last.place.item) == item_count(s, place.item):
            last.place = place
            last.shortest = shortest
            return
    contexts.at[contexts.count] = Context(place, shortest, longest)
    contexts.count += 1

cdef void find_contexts(Store* s, const Place* matches, int32_t matched, Contexts* out) noexcept nogil:
    """The contexts that go on, from the places of the `matched` shortest orders."""
    cdef int32_t order, longest
    out.count = 0
    for order in range(matched - 1, -1, -1):
        if goes_on(s, matches[order]):
            # Lengths between two orders are taken for the shorter one.
            longest = LENGTHS[order + 1] - 1 if out.count else LENGTHS[order]
            add_context(s, out, matches[order], LENGTHS[order], longest)

cdef inline bint needed(const Context* context) noexcept nogil:
    """Whether some order is as long."""
    return LENGTHS[ORDER_OF[context.longest] - 1] >= context.shortest

cdef inline void fetch_item(Store* s, int32_t item) noexcept nogil:
    if item >= 0:
        prefetch(node_at(s, item))
    elif item != NO_ITEM:
        prefetch(link_at(s, ~item))
        prefetch(page_of(s, ~item))

cdef void fetch_steps(Store* s, const Contexts* above, token_t token) noexcept nogil:
    """Ask for what `step_contexts` will read, which lies all over memory, all of it at once."""
    cdef int64_t homes[ORDERS]
    cdef Place place
    cdef int32_t i, count = 0
    for i in range(above.count):
        place = above.at[i].place
        if place.item >= 0 and place.depth == node_at(s, place.item).depth and branches(s, place.item):
            homes[count] = home_of(s, tag_of(place.item, token))
            prefetch(&s.slots[homes[count]])
            count += 1
    for i in range(count):
        fetch_item(s, s.slots[homes[i]].item)

cdef void step_contexts(Store* s, const Contexts* above, token_t token, Contexts* out) noexcept nogil:
    """The contexts one token on. Where no order is as long as one, the next shorter one stands for it."""
    cdef int32_t i, longest, instead_of = 0
    cdef Place place
    out.count = 0
    fetch_steps(s, above, token)
    for i in range(above.count):
        place = above.at[i].place
        if above.at[i].shortest >= LONGEST or not step(s, &place, token) or not goes_on(s, place):
            continue
        longest = max(instead_of, min(above.at[i].longest + 1, LONGEST))
        add_context(s, out, place, above.at[i].shortest + 1, longest)
        instead_of = 0
        if not needed(&out.at[out.count - 1]):
            out.count -= 1
            instead_of = longest
    place.item, place.depth = ROOT, 0
    if step(s, &place, token) and goes_on(s, place):
        add_context(s, out, place, 1, max(instead_of, 1))

cdef int32_t matched_orders(
    Store* s, const token_t* last, int32_t count, Place* matches
) noexcept nogil:
    """Where the last tokens of a text lead, by order; returns how many orders match."""
    cdef int32_t order, i
    for order in range(ORDERS):
        if LENGTHS[order] > count or LENGTHS[order] > s.max_depth:
            return order
        matches[order].item = ROOT
        matches[order].depth = 0
        for i in range(count - LENGTHS[order], count):
            if not step(s, &matches[order], last[i]):
                return order
    return ORDERS

cdef int32_t sequence_orders(Store* s, int32_t sequence, Place* matches) noexcept nogil:
    """The same for the end of a sequence: its pending suffixes are where they lead."""
    cdef Sequence* q = sequence_at(s, sequence)
    cdef int32_t longest = q.length - q.pending, order, length = 1
    cdef int32_t position = (q.last_page << PAGE_BITS) + (q.length - 1) % PAGE_TOKENS
    for order in range(ORDERS):
        if LENGTHS[order] > longest:
            return order
        position = backward(s, position, LENGTHS[order] - length)
        length = LENGTHS[order]
        matches[order].item = ~link_at(s, position).node
        matches[order].depth = length
    return ORDERS

cdef int32_t find_contexts_of(const MixedText* text, Contexts* out) noexcept nogil:
    """The contexts at a text's end, by source; returns the tokens of the longest one."""
    cdef int32_t source, sequence, matched, longest = 0
    cdef Place[ORDERS] matches
    cdef Store* s
    for source in range(SOURCES):
        s, sequence = text.sources.stores[source], text.sequences[source]
        out[source].count = 0
        if s == NULL:
            continue
        # Without pending suffixes all of a sequence matches, and perhaps what stood before it.
        if sequence != NIL and sequence_at(s, sequence).pending:
            matched = sequence_orders(s, sequence, matches)
        else:
            matched = matched_orders(s, text.last, text.count, matches)
        find_contexts(s, matches, matched, &out[source])
        if out[source].count:
            longest = max(longest, out[source].at[0].longest)
    return longest
