# What speaks for the tokens that may follow a text: the contexts that end where it does, how they went
# on, and where the text copies from.

cdef enum:
    SOURCES = 3            # the text, the memory, a corpus
    ORDERS = 10            # lengths of context
    KINDS = ORDERS + 1     # contexts of each source: of each length, and a pair before a gap
    CONTEXTS = SOURCES * KINDS
    COPIES = 2             # ways in which a copy may go on
    NAMES = 9              # continuations that a context names: the most frequent, and the latest
    KNOWN = 1 << 14        # nodes whose continuations are kept
    LONGEST = 24           # tokens of the longest context looked at

cdef struct Context:
    Place place    # its shortest length's: where lengths go on alike, one stands for all
    int32_t shortest, longest

cdef struct Contexts:  # one source's, the longest first
    Context at[ORDERS]
    int32_t count

cdef struct Copy:  # where a text copies from
    int32_t next      # position of the token that comes next; NIL: the two have parted
    int32_t length    # tokens copied in a row
    int32_t left      # position of the token that did not come when they parted; NIL: they never did
    int32_t since     # tokens since then
    int32_t breaks    # lately
    token_t last[3]   # the text's, the last one first; −1: there are fewer

cdef struct Names:  # how one context goes on
    token_t tokens[NAMES]
    uint8_t offsets[NAMES]  # the cells' that speak for each: 2 * bucket of its share + whether it came last
    uint8_t size
    uint8_t more            # whether there are others
    int32_t support

cdef struct KnownNames:  # a node's of the tree with this serial, while its stamp is this one
    int32_t store, node
    uint32_t stamp
    Names names

cdef struct Reading:
    Context context
    Store* store
    int32_t source
    int32_t item              # the next continuation
    int32_t read              # continuations so far,
    int32_t positions[NAMES]  # their tokens'
    int32_t counts[NAMES]
    Names names

cdef struct Sources:
    Store* stores[SOURCES]  # NULL where there is none
    token_t vocab_size      # no id from here on is a candidate

cdef struct Trend:  # a text's: how often its likeliest candidates came, and how often they were due
    float hits, misses, due_hits, due_misses

cdef struct MixedText:  # a text, and what it is drafted from
    Sources sources
    int32_t sequences[SOURCES]  # each source's, which end as the text does; NIL: there is none
    token_t last[LONGEST]       # its last tokens, the last one at the end
    int32_t count               # how many these are
    int32_t nodes               # most to draft
    Copy copy
    Trend trend


# Contexts: those that end where a text does, in one suffix tree, and how they move along with it.

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

cdef int32_t find_contexts_of(const MixedText* text, Contexts* out) noexcept nogil:
    """The contexts at a text's end, by source; returns the tokens of the longest one."""
    cdef int32_t source, sequence, matched, order, longest = 0
    cdef Place[ORDERS] matches
    cdef Store* s
    for source in range(SOURCES):
        s, sequence = text.sources.stores[source], text.sequences[source]
        out[source].count = 0
        if s == NULL:
            continue
        for order in range(ORDERS):
            matches[order].depth = LENGTHS[order]
        # All of a sequence without pending suffixes matches, and perhaps what stood before it.
        if sequence != NIL and sequence_at(s, sequence).pending:
            matched = match_sequence(s, sequence, matches, ORDERS)
        else:
            matched = match_tokens(s, text.last, text.count, matches, ORDERS)
        find_contexts(s, matches, matched, &out[source])
        if out[source].count:
            longest = max(longest, out[source].at[0].longest)
    return longest

cdef int32_t list_contexts(Sources* sources, const Contexts* contexts, Reading* out) noexcept nogil:
    """The contexts of all sources, the longest first; returns their number."""
    cdef int32_t next[SOURCES]
    cdef int32_t source, best, count = 0
    for source in range(SOURCES):
        next[source] = 0
    while True:
        best = -1
        for source in range(SOURCES):
            if next[source] < contexts[source].count and (
                best < 0
                or contexts[source].at[next[source]].longest > contexts[best].at[next[best]].longest
            ):
                best = source
        if best < 0:
            return count
        out[count].context = contexts[best].at[next[best]]
        out[count].store, out[count].source = sources.stores[best], best
        next[best] += 1
        count += 1


# Names, how contexts go on: their most frequent continuations and the latest one, with the evidence for each.
#
# Continuations lie all over memory, so those of all contexts are read side by side, each step asking
# for what the next one needs. What was read at a node is kept while the node's stamp stays.

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

cdef inline KnownNames* home_of_names(KnownNames* known, Store* s, int32_t node) noexcept nogil:
    """Where the names of a node are kept, if they are."""
    return known + (scramble(<uint32_t>node + s.serial) & (KNOWN - 1))

cdef inline bint is_known(const KnownNames* known, Store* s, int32_t node) noexcept nogil:
    return known.node == node and known.store == s.serial and known.stamp == node_at(s, node).stamp

cdef inline void store_names(KnownNames* known, Store* s, int32_t node, const Names* names) noexcept nogil:
    known.store, known.node, known.stamp = s.serial, node, node_at(s, node).stamp
    known.names = names[0]

cdef inline void read_edge(Reading* r) noexcept nogil:
    """Read the one continuation that there is inside an edge."""
    r.names.size, r.names.more = 0, False
    r.names.support = item_count(r.store, r.context.place.item)
    add_name(&r.names, token_at(r.store, label_end(r.store, r.context.place.item, r.context.place.depth + 1)),
             r.names.support, True)

cdef inline void note_name(Reading* r, int32_t item) noexcept nogil:
    """Note where a continuation's token stands, which is read later."""
    cdef int32_t position = label_end(r.store, item, r.context.place.depth + 1)
    r.positions[r.read] = position
    r.counts[r.read] = item_count(r.store, item)
    r.read += 1
    prefetch(&page_of(r.store, position).tokens[position & (PAGE_TOKENS - 1)])

cdef inline void begin_reading(Reading* r) noexcept nogil:
    cdef Node* v = node_at(r.store, r.context.place.item)
    r.read, r.item = 0, first_item(r.store, r.context.place.item)
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
    cdef Node* v = node_at(r.store, r.context.place.item)
    cdef token_t latest = token_after(r.store, v.end), token
    cdef bint named = latest < 0
    cdef int32_t i, item
    names.size, names.support, names.more = 0, v.count - v.ends, r.item != NO_ITEM
    for i in range(r.read):
        token = token_at(r.store, r.positions[i])
        named |= token == latest
        add_name(names, token, r.counts[i], token == latest)
    if names.more and not named:
        item = child_of(r.store, r.context.place.item, latest)
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
        if r.context.place.depth < item_depth(r.store, r.context.place.item):
            read_edge(r)
            continue
        home = home_of_names(known, r.store, r.context.place.item)
        if is_known(home, r.store, r.context.place.item):
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
        store_names(home_of_names(known, r.store, r.context.place.item), r.store, r.context.place.item, &r.names)

cdef inline void fetch_names(KnownNames* known, Store* s, const Contexts* contexts) noexcept nogil:
    """Ask for what is known of the contexts that are read next."""
    cdef int32_t i
    for i in range(contexts.count):
        if contexts.at[i].place.item >= 0:
            prefetch(home_of_names(known, s, contexts.at[i].place.item))


# Copies: where a text copies from what stands before it, across what it changes on the way.
#
# A copy is a place in the text that moves along with what is written. Where the two part, it waits
# until the text comes back to some place near by: after tokens put in, left out, or put in for others.

cdef enum:
    PATIENCE = 64   # tokens after which a copy that the text has left is given up
    BEHIND = 8      # tokens before the place where the text left it, and
    REACH = 64      # tokens past the place where it would be by now at which it may be met again


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
