# The most probable tokens, and those below them, drafted best first from mixed contexts.


cdef void queue_guess(MixedDraft* d, Guess guess) noexcept nogil:
    """Put a guess behind those that are as probable; the last one gives way where there is no room."""
    cdef int32_t end = d.size + d.queued, place = end
    while place > d.size and d.guesses[place - 1].prob < guess.prob:
        place -= 1
    if place == d.budget:
        return
    if end < d.budget:
        d.queued += 1
    else:
        end -= 1
    memmove(&d.guesses[place + 1], &d.guesses[place], (end - place) * sizeof(Guess))
    d.guesses[place] = guess

cdef void queue_candidates(MixedDraft* d, const Expansion* e, int32_t parent, float above) noexcept nogil:
    cdef int32_t k
    cdef float prob
    for k in range(e.size):
        prob = above * e.probs[k]
        if prob >= d.min_prob:
            queue_guess(d, Guess(e.tokens[k], parent, e.sources[k], prob))

cdef void expand_root(
    MixedDraft* d, Mixture* m, Sources* sources, const Trend* trend, Expansion* e
) noexcept nogil:
    expand(m, sources, d.contexts, d.copies, e)
    apply_trend(trend, e)
    queue_candidates(d, e, -1, 1)

cdef void expand_node(
    MixedDraft* d, int32_t node, Mixture* m, Sources* sources, const Trend* trend, Expansion* e
) noexcept nogil:
    """Queue a node's children; its contexts are its parent's one token on."""
    cdef const Guess* guess = &d.guesses[node]
    cdef const Contexts* above = d.contexts + (guess.parent + 1) * SOURCES
    cdef Contexts* here = d.contexts + (node + 1) * SOURCES
    cdef Copy* copy = d.copies + node + 1
    copy[0] = d.copies[guess.parent + 1]
    step_all(m, sources, above, copy, guess.token, here)
    expand(m, sources, here, copy, e)
    apply_trend(trend, e)
    queue_candidates(d, e, node, guess.prob)

cdef void draft_mixed(
    MixedDraft* d, Mixture* m, Sources* sources, const Trend* trend, Expansion* e
) noexcept nogil:
    """Draft from the contexts and the copy of the root."""
    d.size = d.queued = 0
    expand_root(d, m, sources, trend, e)
    while d.queued and d.size < d.budget:
        d.size += 1
        d.queued = 0 if d.path else d.queued - 1
        if d.size < d.budget:
            expand_node(d, d.size - 1, m, sources, trend, e)

cdef void draft_text(
    MixedText* text, double alpha, MixedDraft* d, Mixture* m, Expansion* e
) noexcept nogil:
    """Draft behind a text; there is room for its nodes."""
    cdef int32_t longest = find_contexts_of(text, d.contexts)
    d.budget = <int32_t>min(<double>text.nodes, alpha * max(longest, 1))
    d.copies[0] = text.copy[0]
    find_copy(&text.sources, d.contexts, d.copies)
    draft_mixed(d, m, &text.sources, text.trend, e)
