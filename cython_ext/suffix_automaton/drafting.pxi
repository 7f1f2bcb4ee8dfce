# Matching a text against the suffix automaton, and what is drafted from the match.

cdef struct Match:
    state_t state
    int32_t length

cdef struct Continuation:       # a string that a draft may go on to
    double prob
    state_t state, above        # its own, and that of the string without the last token
    token_t token
    int32_t parent              # node of the draft, -1: the match
    int32_t context             # tokens before the last one, those of the match included

cdef struct Frontier:           # a draft's that branches
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
        available = state_at(a, s).latest if latest else earliest_end(a, s)
        if following(a, available, limit) > best:
            end[0] = available
            best = following(a, available, limit)
        if best == limit:
            break
        s = link_of(a, s)
    return best


# Occurrences of the states of a finished automaton

cdef inline void fold(Automaton* a, state_t s) noexcept nogil:
    """Add a state's occurrences to those of its link, which is shorter."""
    cdef state_t link = link_of(a, s)
    a.counts[link] += a.counts[s]
    state_at(a, link).latest = max(state_at(a, link).latest, state_at(a, s).latest)

cdef int count_occurrences(Automaton* a) except -1 nogil:
    """Occurrences and latest ends, from the longest states to the shortest. O(states)."""
    cdef size_t states = a.n + 1 + a.clone_count
    cdef int32_t* block = <int32_t*>resized(NULL, 2 * states * sizeof(int32_t))
    cdef state_t* first = block + states    # clone of a length, ROOT: none
    cdef state_t* next = first + a.n + 1    # clone of the same length
    cdef int64_t length, i
    cdef state_t s
    memset(block, 0, 2 * states * sizeof(int32_t))
    a.counts = block + a.clone_count
    for i in range(a.clone_count):
        next[i], first[a.clones[i].length] = first[a.clones[i].length], ~<state_t>i
    for length in range(a.n, 0, -1):
        a.counts[length] += a.positions[length].token != SEPARATOR
        fold(a, <state_t>length)
        s = first[length]
        while s != ROOT:
            fold(a, s)
            s = next[~s]
    a.counts = <int32_t*>resized(block, states * sizeof(int32_t)) + a.clone_count
    return 0

cdef void sort_branches(Automaton* a, state_t s, int64_t* keys) noexcept nogil:
    """Chain the further transitions of `s`, the most frequent first, of equal ones the lower token."""
    cdef token_t token = state_at(a, s).branch
    cdef token_t* place = &state_at(a, s).branch
    cdef const Slot* slot
    cdef int64_t n = 0, i
    while token != NO_TOKEN:
        slot = find(&a.branches, s, token)
        keys[n] = sort_key(-a.counts[slot.target], token)
        token = slot.next_branch
        n += 1
    sort(keys, n)
    for i in range(n):
        place[0] = key_value(keys[i])
        place = &find(&a.branches, s, place[0]).next_branch
    place[0] = NO_TOKEN

cdef int sort_all_branches(Automaton* a) except -1 nogil:
    """No state branches into more tokens than the root does."""
    cdef int64_t* keys = <int64_t*>resized(NULL, a.root.used * sizeof(int64_t))
    cdef int64_t s
    for s in range(-a.clone_count, a.n + 1):
        if s != ROOT and state_at(a, <state_t>s).branch != NO_TOKEN:
            sort_branches(a, <state_t>s, keys)
    free(keys)
    return 0


# Drafts that branch by counts

cdef void offer(
    const Automaton* a, Frontier* f, const Continuation* parent, int32_t index,
    token_t token, state_t target,
) noexcept nogil:
    cdef Continuation* c = &f.offers[f.offered]
    c.prob = parent.prob * (<float>a.counts[target] / a.counts[parent.state])
    if c.prob < f.min_prob:
        return
    c.state, c.above, c.token = target, parent.state, token
    c.parent, c.context = index, parent.context + 1
    # Ties by parent and token, so that equal texts give equal drafts.
    push(f.heap, &f.waiting, Entry(c.prob, sort_key(index, token), f.offered))
    f.offered += 1

cdef void expand(const Automaton* a, Frontier* f, const Continuation* parent, int32_t index) noexcept nogil:
    """Offer the most frequent transitions: the sorted branches, with the first one merged in."""
    cdef state_t s = parent.state
    cdef token_t token = state_at(a, s).branch
    cdef const Slot* slot
    cdef int32_t first = 0
    cdef int64_t left = f.max_children
    if first_token(a, s) != SEPARATOR:
        first = a.counts[first_target(a, s)]
    while left > 0 and token != NO_TOKEN:
        slot = find(&a.branches, s, token)
        if first < a.counts[slot.target]:
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
        counts[0, n], counts[1, n] = a.counts[top.state], a.counts[top.above]
        expand(a, f, &top, <int32_t>n)
        n += 1
    return n
