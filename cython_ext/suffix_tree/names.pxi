# How contexts go on: their most frequent continuations and the latest one, with the evidence for each.
#
# Continuations lie all over memory, so those of all contexts are read side by side, each step asking
# for what the next one needs. What was read at a node is kept while the node's stamp stays.


# Evidence

cdef inline int32_t support_bucket(int32_t support) noexcept nogil:
    return (support > 1) + (support > 2) + (support > 4) + (support > 9) + (support > 49) + (support > 199)

cdef inline int32_t share_bucket(float share) noexcept nogil:
    """1 to 8; 0 and 9 are for continuations that were not seen."""
    return (1 + (share > 0.02) + (share > 0.06) + (share > 0.15) + (share > 0.3) + (share >= 0.5)
            + (share > 0.7) + (share > 0.999))

cdef inline void add_name(Names* names, token_t token, int32_t count, bint latest) noexcept nogil:
    names.tokens[names.size] = token
    names.offsets[names.size] = 2 * share_bucket(<float>count / names.support) + latest
    names.size += 1


# What is known

cdef inline KnownNames* home_of_names(KnownNames* known, Store* s, int32_t node) noexcept nogil:
    """Where the names of a node are kept, if they are."""
    return known + (scramble(<uint32_t>node + s.serial) & (KNOWN - 1))

cdef inline bint is_known(const KnownNames* known, Store* s, int32_t node) noexcept nogil:
    return known.node == node and known.store == s.serial and known.stamp == node_at(s, node).stamp

cdef inline void keep_names(KnownNames* known, Store* s, int32_t node, const Names* names) noexcept nogil:
    known.store, known.node, known.stamp = s.serial, node, node_at(s, node).stamp
    known.names = names[0]


# Reading

cdef inline void read_edge(Reading* r) noexcept nogil:
    """Inside an edge there is but one continuation."""
    r.names.size, r.names.more = 0, False
    r.names.support = item_count(r.store, r.place.item)
    add_name(&r.names, token_at(r.store, label_end(r.store, r.place.item, r.place.depth + 1)),
             r.names.support, True)

cdef inline void note_name(Reading* r, int32_t item) noexcept nogil:
    """Note where a continuation's token stands, which is read later."""
    cdef int32_t position = label_end(r.store, item, r.place.depth + 1)
    r.positions[r.read] = position
    r.counts[r.read] = item_count(r.store, item)
    r.read += 1
    prefetch(&page_of(r.store, position).tokens[position & (PAGE_TOKENS - 1)])

cdef inline void begin_reading(Reading* r) noexcept nogil:
    cdef Node* v = node_at(r.store, r.place.item)
    r.read, r.item = 0, first_item(r.store, r.place.item)
    fetch_item(r.store, r.item)
    prefetch(page_of(r.store, v.end))

cdef inline void read_on(Reading* r) noexcept nogil:
    if r.item != NO_ITEM:
        note_name(r, r.item)
        r.item = next_item(r.store, r.item)
        fetch_item(r.store, r.item)

cdef inline token_t token_after(Store* s, int32_t position) noexcept nogil:
    """What follows a position in its sequence, −1 at its end."""
    if start_of(s, position) + 1 >= sequence_at(s, page_of(s, position).owner).length:
        return -1
    return token_at(s, forward(s, position, 1))

cdef void end_reading(Reading* r) noexcept nogil:
    """Read the tokens, and add the latest one if it is not among the most frequent."""
    cdef Names* names = &r.names
    cdef Node* v = node_at(r.store, r.place.item)
    cdef token_t latest = token_after(r.store, v.end), token
    cdef bint named = latest < 0
    cdef int32_t i, item
    names.size, names.support, names.more = 0, v.count - v.ends, r.item != NO_ITEM
    for i in range(r.read):
        token = token_at(r.store, r.positions[i])
        named |= token == latest
        add_name(names, token, r.counts[i], token == latest)
    if names.more and not named:
        item = child_of(r.store, r.place.item, latest)
        if item != NO_ITEM:
            add_name(names, latest, item_count(r.store, item), True)

cdef void read_names(KnownNames* known, Reading* readings, int32_t count) noexcept nogil:
    """How each of the contexts goes on."""
    cdef Reading* unknown[CONTEXTS]
    cdef Reading* r
    cdef KnownNames* home
    cdef int32_t i, step, unknowns = 0
    for i in range(count):
        r = &readings[i]
        if r.place.depth < item_depth(r.store, r.place.item):
            read_edge(r)
            continue
        home = home_of_names(known, r.store, r.place.item)
        if is_known(home, r.store, r.place.item):
            r.names = home.names
            continue
        begin_reading(r)
        unknown[unknowns] = r
        unknowns += 1
    for step in range(NAMES - 1):
        for i in range(unknowns):
            read_on(unknown[i])
    for i in range(unknowns):
        r = unknown[i]
        end_reading(r)
        keep_names(home_of_names(known, r.store, r.place.item), r.store, r.place.item, &r.names)

cdef inline void fetch_names(KnownNames* known, Store* s, const Contexts* contexts) noexcept nogil:
    """Ask for what is known of contexts that will be heard next."""
    cdef int32_t i
    for i in range(contexts.count):
        if contexts.at[i].place.item >= 0:
            prefetch(home_of_names(known, s, contexts.at[i].place.item))
