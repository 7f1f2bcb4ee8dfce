# Drafts from a suffix automaton that branch by their counts.


cdef void offer(
    const Automaton* a, Frontier* f, const Candidate* parent, int32_t index,
    token_t token, state_t target,
) noexcept nogil:
    cdef Candidate* c = &f.candidates[f.offered]
    c.rate = <float>count_of(a, target) / count_of(a, parent.state)
    c.prob = parent.prob * c.rate
    if c.prob < f.min_prob:
        return
    c.state, c.token, c.parent = target, token, index
    # Ties by parent and token, so that equal texts give equal drafts.
    push(f.heap, &f.waiting, Entry(c.prob, index * (<int64_t>1 << 32) + token, f.offered))
    f.offered += 1


cdef void expand(
    const Automaton* a, Frontier* f, const Candidate* parent, int32_t index
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
    const Automaton* a, state_t s, Frontier* f, int64_t limit,
    int32_t* tokens, int32_t* parents, float* rates, int32_t* counts,
) noexcept nogil:
    """Take up to `limit` continuations of a state, the most probable first; returns how many."""
    cdef Candidate top
    cdef int64_t n = 0
    top.state, top.prob = s, 1.0
    expand(a, f, &top, -1)
    while f.waiting > 0 and n < limit:
        top = f.candidates[pop(f.heap, &f.waiting).index]
        tokens[n], parents[n], rates[n] = top.token, top.parent, top.rate
        counts[n] = count_of(a, top.state)
        expand(a, f, &top, <int32_t>n)
        n += 1
    return n
