# The most probable tokens, and those below them, drafted best first from mixed contexts.
from common.heap cimport Entry, pop as heap_pop, push as heap_push
from common.types cimport int32_t, token_t
from suffix_tree.mixing cimport (
    CANDIDATES, Contexts, Copy, Expansion, Guess, MixedDraft, Mixture, SOURCES, Sources, Trend,
)


cdef void queue_candidates(MixedDraft* d, const Expansion* e, int32_t parent, float above) noexcept nogil:
    cdef int32_t k
    cdef float prob
    for k in range(e.size):
        prob = above * e.probs[k]
        if prob >= d.min_prob:
            d.guesses[d.guessed] = Guess(e.tokens[k], parent, e.sources[k], prob)
            heap_push(d.heap, &d.queued, Entry(prob, d.guessed, d.guessed))
            d.guessed += 1

cdef void draft_guess(MixedDraft* d, Sources* sources, const Guess* guess) noexcept nogil:
    """Make a guess a node; its contexts are its parent's one token on."""
    cdef Contexts* above = d.contexts + (guess.parent + 1) * SOURCES
    cdef Contexts* here = d.contexts + (d.size + 1) * SOURCES
    cdef int32_t source
    d.tokens[d.size] = guess.token
    d.parents[d.size] = guess.parent
    d.probs[d.size] = guess.prob
    d.classes[d.size] = -1 - guess.source
    d.size += 1
    d.copies[d.size] = d.copies[guess.parent + 1]
    step_text(sources, &d.copies[d.size], guess.token)
    for source in range(SOURCES):
        here[source].count = 0
        if sources.stores[source] != NULL:
            step_contexts(sources.stores[source], &above[source], guess.token, &here[source])

cdef void draft_mixed(
    MixedDraft* d, Mixture* m, Sources* sources, const Trend* trend, Expansion* e
) noexcept nogil:
    """Draft from the contexts and the copy of the root."""
    cdef Guess guess
    d.size = d.queued = d.guessed = 0
    expand(m, sources, d.contexts, d.copies, e)
    apply_trend(trend, e)
    queue_candidates(d, e, -1, 1.0)
    while d.queued and d.size < d.budget:
        guess = d.guesses[heap_pop(d.heap, &d.queued).index]
        draft_guess(d, sources, &guess)
        if d.size == d.budget:
            break
        if d.path:
            d.queued = d.guessed = 0
        expand(m, sources, d.contexts + d.size * SOURCES, d.copies + d.size, e)
        apply_trend(trend, e)
        queue_candidates(d, e, d.size - 1, guess.prob)
