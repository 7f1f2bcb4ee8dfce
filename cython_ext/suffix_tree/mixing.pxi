# How contexts of several lengths, in several suffix trees, say together what may follow.
#
# Every context is a *witness*. As in context mixing (Mahoney, 2005, "Adaptive weighing of context
# models for lossless data compression"), what a witness says of a candidate is the log odds of an
# adaptive cell, picked by how often and how unanimously the context went on so; a weighted sum of
# what all witnesses say is the candidate's score, and the softmax of the scores its probability.
# Weights and cells follow the text by gradient descent on its coding cost.
#
# A witness says one thing of all candidates that it does not name, so that sums run over what it
# names alone.

cdef enum:
    WITNESSES = CONTEXTS + COPIES
    BOTH = WITNESSES       # input of a candidate that the text and another source name
    BIAS = BOTH + 1
    INPUTS = BIAS + 1
    SUPPORTS = 7           # buckets
    SHARES = 10
    OFFSETS = SHARES * 2   # whether the latest occurrence went on so
    COPY_KINDS = 32        # each way's in which a copy may go on
    COPY_CELL = CONTEXTS * SUPPORTS * OFFSETS  # the first one of copies
    CELLS = COPY_CELL + COPIES * COPY_KINDS * 2
    COPY_STATES = 3        # those `copy_state` tells
    GROUPS = 1 + (ORDERS + 1) + (ORDERS + 1) * COPY_STATES  # groups of weights
    CANDIDATES = 24
    TABLE = 64             # room for the candidates

cdef struct Cell:  # how often candidates with this evidence were right
    float prob, trials

cdef struct Named:  # a candidate, and the offset of the cell that speaks for it
    uint8_t candidate, offset

cdef struct Evidence:  # what a context says
    Named names[CANDIDATES]
    int32_t size, source
    int32_t others  # offset of a candidate that it does not name

cdef struct Witness:
    int32_t input, row  # and its first cell
    int32_t evidence

cdef struct Expansion:  # the candidates for one place, and what speaks for each
    token_t tokens[CANDIDATES]
    int32_t sources[CANDIDATES]   # whose longest context named it first
    int32_t named_by[CANDIDATES]  # bits of sources
    float probs[CANDIDATES]
    int8_t table[TABLE]           # candidates by token, −1: none
    Evidence evidence[WITNESSES]
    Witness witnesses[WITNESSES]
    int32_t size, evidence_count, witness_count, memory_group, text_group

cdef struct Mixture:
    Cell* cells
    float* logits      # the cells'
    float* weights     # [GROUPS, INPUTS]: common, by longest order of memory, by text's and copy
    KnownNames* known  # [KNOWN]
    float rate
    Expansion now      # the place's looked at

cdef struct Guess:
    token_t token
    int32_t parent, source
    float prob

cdef struct MixedDraft:
    int32_t budget
    float min_prob
    Contexts* contexts   # [budget + 1, SOURCES], of the root and the nodes
    Copy* copies         # [budget + 1]
    Guess* guesses       # [budget], the most probable first
    int32_t size         # so many of them are nodes,
    int32_t queued       # and so many follow

cdef float LEAST_PROB = 0.0005
cdef float MOST_TRIALS = 400
cdef float TREND_TRIALS = 5  # what "this text is like others" is worth, in hits and in misses
cdef float TREND_MEMORY = 100


cdef inline float log_odds(float prob) noexcept nogil:
    prob = min(max(prob, LEAST_PROB), 1 - LEAST_PROB)
    return logf(prob / (1 - prob))


# Candidates

cdef inline int32_t candidate(Expansion* e, token_t token, token_t vocab_size, int32_t source) noexcept nogil:
    """Index of a token among the candidates, which it joins if there is room; −1 if not."""
    cdef uint32_t slot = scramble(<uint32_t>token) & (TABLE - 1)
    while e.table[slot] >= 0:
        if e.tokens[e.table[slot]] == token:
            return e.table[slot]
        slot = (slot + 1) & (TABLE - 1)
    if e.size >= CANDIDATES or token >= vocab_size:
        return -1
    e.table[slot] = e.size
    e.tokens[e.size], e.sources[e.size], e.named_by[e.size] = token, source, 0
    e.size += 1
    return e.size - 1

cdef inline void name(Expansion* e, Evidence* said, int32_t candidate, int32_t offset) noexcept nogil:
    said.names[said.size] = Named(candidate, offset)
    said.size += 1
    e.named_by[candidate] |= 1 << said.source

cdef inline Evidence* new_evidence(Expansion* e, int32_t source, int32_t others) noexcept nogil:
    cdef Evidence* said = &e.evidence[e.evidence_count]
    said.size, said.source, said.others = 0, source, others
    e.evidence_count += 1
    return said

cdef inline void add_witness(Expansion* e, int32_t input, int32_t row) noexcept nogil:
    """Let an input read the cells from `row` on for the latest evidence."""
    e.witnesses[e.witness_count] = Witness(input, row, e.evidence_count - 1)
    e.witness_count += 1

cdef void take_names(Expansion* e, const Names* names, int32_t source, token_t vocab_size) noexcept nogil:
    """Add what a context names to the candidates, with its evidence for each of them."""
    cdef bint alone = names.size == 1 and not names.more
    cdef Evidence* said = new_evidence(e, source, 2 * (SHARES - 1) if alone else 0)
    cdef int32_t i, k
    for i in range(names.size):
        k = candidate(e, names.tokens[i], vocab_size, source)
        if k >= 0:
            name(e, said, k, names.offsets[i])

cdef inline void add_context_witness(
    Expansion* e, int32_t source, int32_t kind, int32_t support
) noexcept nogil:
    cdef int32_t input = source * KINDS + kind
    add_witness(e, input, (input * SUPPORTS + support_bucket(support)) * OFFSETS)

cdef void take_context(Expansion* e, const Reading* r, token_t vocab_size) noexcept nogil:
    """Add a context of the trie, for each order that it is as long as.

    In the text itself for the longest one alone: where a text copies, all lengths say the same.
    """
    cdef int32_t last = ORDER_OF[r.context.longest], order
    take_names(e, &r.names, r.source, vocab_size)
    for order in range(ORDER_OF[r.context.shortest - 1] if r.source else last - 1, last):
        add_context_witness(e, r.source, order, r.names.support)

cdef void take_gap(
    Expansion* e, Store* s, const token_t* last, int32_t source, token_t vocab_size
) noexcept nogil:
    """Add what followed the pair before the last token."""
    cdef const Gap* gap = gap_after(s, last[1], last[2])
    cdef Names names
    cdef int32_t i
    if gap == NULL or not gap.counts[0]:
        return
    names.size, names.support, names.more = 0, gap.total, False
    for i in range(names_of(gap)):
        add_name(&names, gap.tokens[i], gap.counts[i], i == gap.latest)
    take_names(e, &names, source, vocab_size)
    add_context_witness(e, source, ORDERS, names.support)

cdef void take_copy(Expansion* e, Store* text, const Copy* copy, token_t vocab_size) noexcept nogil:
    """Add what follows if the copy goes on, or if it goes on now where the text has left it."""
    cdef int32_t way = copy.next == NIL, kind = length_bucket(copy.length) * 4 + copy.breaks, k
    cdef Evidence* said
    if way:
        kind = min(copy.since, 8) * 2 + (copy.breaks > 1)
    if copy_state(copy):
        said = new_evidence(e, 0, 0)
        k = candidate(e, token_at(text, copy.left if way else copy.next), vocab_size, 0)
        if k >= 0:
            name(e, said, k, 1)
        add_witness(e, CONTEXTS + way, COPY_CELL + (way * COPY_KINDS + kind) * 2)

cdef inline int32_t find_tag(Store* s, int64_t slot, uint32_t tag) noexcept nogil:
    """The first item of a tag from a slot on, whose parent is most likely the one meant."""
    while s.slots[slot].item != NO_ITEM and s.slots[slot].tag != tag:
        slot = after(s, slot)
    return s.slots[slot].item

cdef void look_up(Expansion* e, const Reading* r, Evidence* said) noexcept nogil:
    """Complete the evidence of a context that goes on in more ways than were read."""
    cdef Store* s = r.store
    cdef int32_t missing[CANDIDATES]
    cdef int32_t items[CANDIDATES]
    cdef uint32_t tags[CANDIDATES]
    cdef uint32_t named = 0
    cdef int32_t i, k, count = 0, found = 0
    for i in range(said.size):
        named |= <uint32_t>1 << said.names[i].candidate
    for k in range(e.size):
        if not named >> k & 1:
            missing[count], tags[count] = k, tag_of(r.context.place.item, e.tokens[k])
            prefetch(&s.slots[home_of(s, tags[count])])
            count += 1
    for i in range(count):
        items[found] = find_tag(s, home_of(s, tags[i]), tags[i])
        if items[found] != NO_ITEM:
            missing[found] = missing[i]
            fetch_item(s, items[found])
            found += 1
    for i in range(found):
        k = missing[i]
        if item_parent(s, items[i]) != r.context.place.item:
            items[i] = table_find(s, r.context.place.item, e.tokens[k])
        if items[i] != NO_ITEM:
            name(e, said, k, 2 * share_bucket(<float>item_count(s, items[i]) / r.names.support))

cdef inline int32_t longest_order(const Contexts* contexts) noexcept nogil:
    return ORDER_OF[contexts.at[0].longest] if contexts.count else 0

cdef void expand(Mixture* m, Sources* sources, const Contexts* contexts, const Copy* copy) noexcept nogil:
    """The candidates, those of the longest contexts first, their evidence and probabilities."""
    cdef Expansion* e = &m.now
    cdef Reading readings[CONTEXTS]
    cdef int32_t i, source, first, count = list_contexts(sources, contexts, readings)
    e.size = e.evidence_count = e.witness_count = 0
    memset(e.table, -1, sizeof(e.table))
    read_names(m.known, readings, count)
    if sources.stores[0] != NULL:
        take_copy(e, sources.stores[0], copy, sources.vocab_size)
    first = e.evidence_count
    for i in range(count):
        take_context(e, &readings[i], sources.vocab_size)
    for source in range(SOURCES):
        if sources.stores[source] != NULL:
            take_gap(e, sources.stores[source], copy.last, source, sources.vocab_size)
    for i in range(count):
        if readings[i].names.more:
            look_up(e, &readings[i], &e.evidence[first + i])
    e.memory_group = 1
    for source in range(1, SOURCES):
        e.memory_group = max(e.memory_group, 1 + longest_order(&contexts[source]))
    e.text_group = 2 + ORDERS + COPY_STATES * longest_order(&contexts[0]) + copy_state(copy)
    score(m)


# Scores

cdef inline float* weights_of(Mixture* m, int32_t group) noexcept nogil:
    return m.weights + group * INPUTS

cdef inline bint named_by_both(const Expansion* e, int32_t k) noexcept nogil:
    """Whether the text and another source name a candidate."""
    return (e.named_by[k] & 1) != 0 and e.named_by[k] > 1

cdef void sum_inputs(Mixture* m, float* scores) noexcept nogil:
    cdef Expansion* e = &m.now
    cdef const float* common = weights_of(m, 0)
    cdef const float* memory = weights_of(m, e.memory_group)
    cdef const float* text = weights_of(m, e.text_group)
    cdef const float* logits
    cdef Evidence* said
    cdef int32_t i, j, k
    cdef float weight, of_all = common[BIAS] + memory[BIAS] + text[BIAS]
    weight = common[BOTH] + memory[BOTH] + text[BOTH]
    for k in range(e.size):
        scores[k] = weight * named_by_both(e, k)
    for i in range(e.witness_count):
        j, said = e.witnesses[i].input, &e.evidence[e.witnesses[i].evidence]
        logits = m.logits + e.witnesses[i].row
        weight = common[j] + memory[j] + text[j]
        of_all += weight * logits[said.others]
        for k in range(said.size):
            scores[said.names[k].candidate] += weight * (logits[said.names[k].offset] - logits[said.others])
    for k in range(e.size):
        scores[k] += of_all

cdef void score(Mixture* m) noexcept nogil:
    """Probabilities of the candidates: the softmax of their scores and of 0, that of none of them."""
    cdef Expansion* e = &m.now
    cdef int32_t k
    cdef float highest = 0, total
    sum_inputs(m, e.probs)
    for k in range(e.size):
        highest = max(highest, e.probs[k])
    total = expf(-highest)
    for k in range(e.size):
        e.probs[k] = expf(e.probs[k] - highest)
        total += e.probs[k]
    for k in range(e.size):
        e.probs[k] /= total


# Trend: whether a text is more predictable than others, or less

cdef inline int32_t likeliest(const Expansion* e) noexcept nogil:
    """The candidate that is more probable than all else together; −1: there is none."""
    cdef int32_t k
    for k in range(e.size):
        if e.probs[k] > 0.5:
            return k
    return -1

cdef void apply_trend(const Trend* t, Expansion* e) noexcept nogil:
    """Shift the odds of the likeliest candidate as they have proved lately; the others follow."""
    cdef int32_t k, top = likeliest(e)
    cdef float odds, others, prob
    if top < 0:
        return
    prob = e.probs[top]
    odds = (t.hits / t.due_hits) * (t.due_misses / t.misses)
    e.probs[top] = prob * odds / (1 + (odds - 1) * prob)
    others = (1 - e.probs[top]) / max(1 - prob, <float>1e-6)
    for k in range(e.size):
        if k != top:
            e.probs[k] *= others

cdef inline float faded(float trials) noexcept nogil:
    return 0.5 * (trials + TREND_TRIALS)

cdef void follow_trend(Trend* t, const Expansion* e, token_t token) noexcept nogil:
    """Count what came of the likeliest candidate, before any trend was applied to it."""
    cdef int32_t top = likeliest(e)
    if top < 0:
        return
    t.hits += e.tokens[top] == token
    t.misses += e.tokens[top] != token
    t.due_hits += e.probs[top]
    t.due_misses += 1 - e.probs[top]
    if t.hits + t.misses > TREND_MEMORY:
        t.hits, t.misses = faded(t.hits), faded(t.misses)
        t.due_hits, t.due_misses = faded(t.due_hits), faded(t.due_misses)


# A text that goes on

cdef inline void find_copy(Sources* sources, const Contexts* contexts, Copy* copy) noexcept nogil:
    if sources.stores[0] != NULL and contexts[0].count:
        adopt_copy(sources.stores[0], copy, &contexts[0].at[0])

cdef void step_text(Sources* sources, Copy* copy, token_t token) noexcept nogil:
    """The copy and the last tokens one token on."""
    if sources.stores[0] != NULL:
        step_copy(sources.stores[0], copy, token)
    copy.last[2], copy.last[1], copy.last[0] = copy.last[1], copy.last[0], token

cdef void step_all(
    Mixture* m, Sources* sources, const Contexts* contexts, Copy* copy, token_t token, Contexts* out
) noexcept nogil:
    """The contexts of all sources, the copy and the last tokens one token on; `out` is elsewhere."""
    cdef int32_t source
    step_text(sources, copy, token)
    for source in range(SOURCES):
        out[source].count = 0
        if sources.stores[source] != NULL:
            step_contexts(sources.stores[source], &contexts[source], token, &out[source])
            fetch_names(m.known, sources.stores[source], &out[source])
            fetch_gap(sources.stores[source], copy.last[1], copy.last[2])


# Learning

cdef inline void count_outcomes(Mixture* m, int32_t cell, int32_t trials, bint hit) noexcept nogil:
    """Learn that of so many candidates with a cell's evidence one was right, or none."""
    cdef Cell* c = &m.cells[cell]
    c.trials = min(c.trials + trials, MOST_TRIALS)
    c.prob += (hit - trials * c.prob) / (c.trials + 1.5)
    m.logits[cell] = log_odds(c.prob)

cdef void learn_cells(Mixture* m, int32_t right) noexcept nogil:
    cdef Expansion* e = &m.now
    cdef Evidence* said
    cdef int32_t i, k, row
    cdef bint hit, named
    for i in range(e.witness_count):
        row, said = e.witnesses[i].row, &e.evidence[e.witnesses[i].evidence]
        named = False
        for k in range(said.size):
            hit = said.names[k].candidate == right
            named |= hit
            count_outcomes(m, row + said.names[k].offset, 1, hit)
        if said.size < e.size:
            count_outcomes(m, row + said.others, e.size - said.size, right >= 0 and not named)

cdef void learn_weights(Mixture* m, int32_t right) noexcept nogil:
    cdef Expansion* e = &m.now
    cdef float* common = weights_of(m, 0)
    cdef float* memory = weights_of(m, e.memory_group)
    cdef float* text = weights_of(m, e.text_group)
    cdef float errors[CANDIDATES]
    cdef float slopes[INPUTS]
    cdef const float* logits
    cdef Evidence* said
    cdef int32_t i, j, k
    memset(slopes, 0, sizeof(slopes))
    for k in range(e.size):
        errors[k] = (k == right) - e.probs[k]
        slopes[BIAS] += errors[k]
        slopes[BOTH] += errors[k] * named_by_both(e, k)
    for i in range(e.witness_count):
        j, said = e.witnesses[i].input, &e.evidence[e.witnesses[i].evidence]
        logits = m.logits + e.witnesses[i].row
        slopes[j] = slopes[BIAS] * logits[said.others]
        for k in range(said.size):
            slopes[j] += errors[said.names[k].candidate] * (logits[said.names[k].offset] - logits[said.others])
    for j in range(INPUTS):
        common[j] += m.rate * slopes[j]
        memory[j] += m.rate * slopes[j]
        text[j] += m.rate * slopes[j]

cdef void learn(Mixture* m, token_t token) noexcept nogil:
    """Learn that `token` was the one that followed."""
    cdef int32_t k, right = -1
    for k in range(m.now.size):
        if m.now.tokens[k] == token:
            right = k
    learn_weights(m, right)
    learn_cells(m, right)

cdef void learn_tokens(Mixture* m, MixedText* text, const token_t[::1] token_ids) noexcept nogil:
    """Learn from the tokens that followed a text."""
    cdef Contexts[SOURCES] contexts
    cdef Contexts[SOURCES] next
    cdef Py_ssize_t i, last = token_ids.shape[0] - 1
    find_contexts_of(text, contexts)
    for i in range(last + 1):
        find_copy(&text.sources, contexts, &text.copy)
        expand(m, &text.sources, contexts, &text.copy)
        follow_trend(&text.trend, &m.now, token_ids[i])
        learn(m, token_ids[i])
        if i == last:
            step_text(&text.sources, &text.copy, token_ids[i])
        else:
            step_all(m, &text.sources, contexts, &text.copy, token_ids[i], next)
            memcpy(contexts, next, sizeof(next))


# Drafts: the most probable tokens, and those below them, best first

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

cdef void expand_node(MixedDraft* d, int32_t node, Mixture* m, MixedText* text) noexcept nogil:
    """Queue the children of a node, −1: the root, whose contexts and copy are known."""
    cdef Contexts* here = d.contexts + (node + 1) * SOURCES
    cdef Copy* copy = d.copies + node + 1
    cdef const Guess* guess
    cdef float prob = 1
    if node >= 0:
        guess = &d.guesses[node]
        prob = guess.prob
        copy[0] = d.copies[guess.parent + 1]
        step_all(m, &text.sources, d.contexts + (guess.parent + 1) * SOURCES, copy, guess.token, here)
    expand(m, &text.sources, here, copy)
    apply_trend(&text.trend, &m.now)
    queue_candidates(d, &m.now, node, prob)

cdef void draft_text(MixedText* text, MixedDraft* d, Mixture* m) noexcept nogil:
    """Draft behind a text; there is room for its nodes."""
    find_contexts_of(text, d.contexts)
    d.budget = text.nodes
    d.copies[0] = text.copy
    find_copy(&text.sources, d.contexts, d.copies)
    d.size = d.queued = 0
    expand_node(d, -1, m, text)
    while d.queued and d.size < d.budget:
        d.size += 1
        d.queued -= 1
        if d.size < d.budget:
            expand_node(d, d.size - 1, m, text)
