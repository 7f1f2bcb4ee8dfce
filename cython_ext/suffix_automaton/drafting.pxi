# Matching a text against the suffix automaton, and what is drafted from the match.

cdef struct Match:
    state_t state
    int32_t length

cdef struct Branch:
    token_t token
    int32_t count

cdef struct Continuation:       # a string that a draft may go on to
    double prob
    state_t state, above        # its own, and that of the string without the last token
    token_t token
    int32_t parent              # node of the draft, -1: the match
    int32_t context             # tokens before the last one, those of the match included

cdef struct Frontier:           # of a draft that branches
    Continuation* offers        # all of them
    Entry* heap                 # those of them that wait
    int32_t offered
    int32_t waiting
    int64_t max_children
    double min_prob

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

cdef int64_t continuation(
    const Automaton* a, Match m, int64_t limit, bint latest, int64_t* end
) noexcept nogil:
    """Set `end` to the occurrence to draft from; returns how many tokens follow it.

    Shorter suffixes of the match occur earlier, and have more followers near the end of the text.
    """
    cdef state_t s = m.state
    cdef int64_t available, best = 0
    while s != ROOT:
        available = latest_end(a, s) if latest else earliest_end(a, s)
        if following(a, available, limit) > best:
            end[0] = available
            best = following(a, available, limit)
        if best == limit:
            break
        s = link_of(a, s)
    return best


# Occurrences of the states of a finished automaton

cdef enum:
    FINISHED = -1

cdef void fold_up(Automaton* a, int32_t* open_children, state_t s) noexcept nogil:
    """Add a finished state to its link, and go on there if it was the link's last open child."""
    cdef state_t link
    while s != ROOT:
        link = link_of(a, s)
        a.counts[link] += a.counts[s]
        if latest_end(a, s) > latest_end(a, link):
            latest_cell(a, link)[0] = latest_end(a, s)
        open_children[link] -= 1
        if open_children[link] > 0:
            return
        open_children[link] = FINISHED
        s = link

cdef void accumulate(Automaton* a, int32_t* open_children) noexcept nogil:
    """Occurrences and latest ends, from the leaves of the link tree upwards. O(states).

    Every clone has children, so the leaves are prefixes. Of each state `open_children` counts those
    that were not added yet.
    """
    cdef int64_t i
    for i in range(1, a.n + 1):
        open_children[a.positions[i].link] += 1
        a.counts[i] = a.positions[i].token != SEPARATOR
    for i in range(a.clone_count):
        open_children[a.clones[i].link] += 1
    for i in range(1, a.n + 1):
        if open_children[i] == 0:
            fold_up(a, open_children, <state_t>i)

cdef int count_occurrences(Automaton* a) except -1 nogil:
    cdef size_t states = a.n + 1 + a.clone_count
    cdef int32_t* block = <int32_t*>resized(NULL, 2 * states * sizeof(int32_t))
    memset(block, 0, 2 * states * sizeof(int32_t))
    a.counts = block + a.clone_count
    accumulate(a, block + states + a.clone_count)
    a.counts = <int32_t*>resized(block, states * sizeof(int32_t)) + a.clone_count
    return 0

cdef int by_count(const void* x, const void* y) noexcept nogil:
    """Frequent first; ties by token, so that equal texts give equal drafts."""
    cdef const Branch* b = <const Branch*>x
    cdef const Branch* c = <const Branch*>y
    if b.count != c.count:
        return -1 if b.count > c.count else 1
    return (b.token > c.token) - (b.token < c.token)

cdef int64_t read_branches(const Automaton* a, state_t s, Branch* out) noexcept nogil:
    cdef token_t token = branch_cell(a, s)[0]
    cdef const Slot* slot
    cdef int64_t n = 0
    while token != NO_TOKEN:
        slot = find(&a.branches, s, token)
        out[n].token, out[n].count = token, count_of(a, slot.target)
        token = slot.next_branch
        n += 1
    return n

cdef void sort_branches(Automaton* a, state_t s, Branch* buffer) noexcept nogil:
    """Chain the further transitions of `s` with the most frequent first."""
    cdef int64_t n = read_branches(a, s, buffer), i
    if n < 2:
        return
    qsort(buffer, n, sizeof(Branch), by_count)
    branch_cell(a, s)[0] = buffer[0].token
    for i in range(n):
        find(&a.branches, s, buffer[i].token).next_branch = (
            buffer[i + 1].token if i + 1 < n else NO_TOKEN
        )

cdef int sort_all_branches(Automaton* a) except -1 nogil:
    """No state branches into more tokens than the root does."""
    cdef Branch* buffer = <Branch*>resized(NULL, a.root.used * sizeof(Branch))
    cdef int64_t s
    for s in range(-a.clone_count, a.n + 1):
        if s != ROOT:
            sort_branches(a, <state_t>s, buffer)
    free(buffer)
    return 0


# Drafts that branch by counts

cdef void offer(
    const Automaton* a, Frontier* f, const Continuation* parent, int32_t index,
    token_t token, state_t target,
) noexcept nogil:
    cdef Continuation* c = &f.offers[f.offered]
    c.prob = parent.prob * (<float>count_of(a, target) / count_of(a, parent.state))
    if c.prob < f.min_prob:
        return
    c.state, c.above, c.token = target, parent.state, token
    c.parent, c.context = index, parent.context + 1
    # Ties by parent and token, so that equal texts give equal drafts.
    push(f.heap, &f.waiting, Entry(c.prob, index * (<int64_t>1 << 32) + token, f.offered))
    f.offered += 1

cdef void expand(
    const Automaton* a, Frontier* f, const Continuation* parent, int32_t index
) noexcept nogil:
    """Offer the most frequent transitions: the sorted branches, with the first one merged in."""
    cdef state_t s = parent.state
    cdef token_t token = branch_cell(a, s)[0]
    cdef const Slot* slot
    cdef int32_t first = 0
    cdef int64_t left = f.max_children
    if first_token(a, s) != SEPARATOR:
        first = count_of(a, first_target(a, s))
    while left > 0 and token != NO_TOKEN:
        slot = find(&a.branches, s, token)
        if first < count_of(a, slot.target):
            offer(a, f, parent, index, token, slot.target)
            token = slot.next_branch
        else:
            offer(a, f, parent, index, first_token(a, s), first_target(a, s))
            first = 0
        left -= 1
    if left > 0 and first > 0:
        offer(a, f, parent, index, first_token(a, s), first_target(a, s))

cdef int64_t best_first(
    const Automaton* a, Match match, Frontier* f, int64_t limit, int32_t[:, ::1] ints, int64_t[:, ::1] counts
) noexcept nogil:
    """Take up to `limit` continuations of a match, the most probable first; returns how many."""
    cdef Continuation top
    cdef int64_t n = 0
    top.state, top.prob, top.context = match.state, 1.0, match.length - 1
    expand(a, f, &top, -1)
    while f.waiting > 0 and n < limit:
        top = f.offers[pop(f.heap, &f.waiting).index]
        ints[0, n], ints[1, n], ints[2, n] = top.token, top.parent, top.context
        counts[0, n], counts[1, n] = count_of(a, top.state), count_of(a, top.above)
        expand(a, f, &top, <int32_t>n)
        n += 1
    return n
