# How contexts of several lengths, in several suffix trees, say together what may follow.
#
# Every context is a *witness*. As in context mixing (Mahoney, 2005, "Adaptive weighing of context
# models for lossless data compression"), what a witness says of a candidate is the log odds of an
# adaptive cell, picked by how often and how unanimously the context went on so; a weighted sum of
# what all witnesses say is the candidate's score, and the softmax of the scores its probability.
# Weights and cells follow the text by gradient descent on its coding cost.
from libc.math cimport expf, logf
from libc.string cimport memset
from suffix_tree.mixing cimport (
    BIAS, BOTH, CANDIDATES, CELLS, CONTEXTS, COPIES, COPY_CELL, COPY_KINDS, COPY_STATES, Cell, Context,
    Contexts, Copy, CopyNames, Expansion, INPUTS, KINDS, LONGEST, Mixture, NAMES, Names, OFFSETS, ORDERS,
    Reading, SHARES, SOURCES, SUPPORTS, Sources, Trend, WITNESSES,
)
from suffix_tree.store cimport (
    NIL, NO_ITEM, Node, Place, PAGE_BITS, PAGE_TOKENS, ROOT, Sequence, Store, backward, forward, item_count, item_depth,
    label_end, link_at, node_at, page_of, sequence_at, start_of, token_at,
)
from common.prefetch cimport prefetch
from common.types cimport int32_t, token_t

cdef int32_t[ORDERS] LENGTHS = [1, 2, 3, 4, 5, 6, 8, 11, 16, LONGEST]
# Longest order of at most so many tokens, counted from 1.
cdef int32_t[LONGEST + 1] ORDER_OF = [
    0, 1, 2, 3, 4, 5, 6, 6, 7, 7, 7, 8, 8, 8, 8, 8, 9, 9, 9, 9, 9, 9, 9, 9, 10]

cdef float LEAST_PROB = 0.0005
cdef float MOST_TRIALS = 400
cdef float TREND_TRIALS = 5  # what "this text is like others" is worth, in hits and in misses
cdef float TREND_MEMORY = 100


# Evidence

cdef inline float log_odds(float prob) noexcept nogil:
    prob = min(max(prob, LEAST_PROB), 1 - LEAST_PROB)
    return logf(prob / (1 - prob))

cdef inline int32_t support_bucket(int32_t support) noexcept nogil:
    return (support > 1) + (support > 2) + (support > 4) + (support > 9) + (support > 49) + (support > 199)

cdef inline int32_t share_bucket(float share) noexcept nogil:
    """1 to 8; 0 and 9 are for continuations that were not seen."""
    return (1 + (share > 0.02) + (share > 0.06) + (share > 0.15) + (share > 0.3) + (share >= 0.5)
            + (share > 0.7) + (share > 0.999))


# Contexts

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

cdef void step_contexts(Store* s, const Contexts* above, token_t token, Contexts* out) noexcept nogil:
    """The contexts one token on. Where no order is as long as one, the next shorter one stands for it."""
    cdef int32_t i, longest, instead_of = 0
    cdef Place place
    out.count = 0
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

cdef int32_t matched_orders(Store* s, const token_t[::1] context, Place* matches) noexcept nogil:
    """Where the last tokens of a context lead, by order; returns how many orders match."""
    cdef Py_ssize_t n = context.shape[0], i
    cdef int32_t order
    for order in range(ORDERS):
        if LENGTHS[order] > n or LENGTHS[order] > s.max_depth:
            return order
        matches[order].item = ROOT
        matches[order].depth = 0
        for i in range(n - LENGTHS[order], n):
            if not step(s, &matches[order], context[i]):
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


# Continuations. They lie all over memory, so those of all contexts are read side by side, each step
# asking for what the next one needs.

cdef inline void fetch_item(Store* s, int32_t item) noexcept nogil:
    if item >= 0:
        prefetch(node_at(s, item))
    elif item != NO_ITEM:
        prefetch(link_at(s, ~item))
        prefetch(page_of(s, ~item))

cdef inline void note_name(Reading* r, int32_t item) noexcept nogil:
    """Note where a continuation's token stands, which is read later."""
    cdef int32_t position = label_end(r.store, item, r.place.depth + 1)
    r.names.tokens[r.names.size] = position
    r.names.counts[r.names.size] = item_count(r.store, item)
    r.names.size += 1
    prefetch(&page_of(r.store, position).tokens[position & (PAGE_TOKENS - 1)])

cdef void begin_reading(Reading* r) noexcept nogil:
    cdef Store* s = r.store
    cdef Node* v
    r.names.size, r.item, r.latest = 0, NO_ITEM, NIL
    r.inside = r.place.depth < item_depth(s, r.place.item)
    if r.inside:
        note_name(r, r.place.item)
        r.names.support, r.names.alone = r.names.counts[0], True
        return
    v = node_at(s, r.place.item)
    r.names.support, r.names.alone = v.count - v.ends, v.children == 1
    r.item = first_item(s, r.place.item)
    fetch_item(s, r.item)
    r.latest = v.end
    prefetch(page_of(s, v.end))

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
    cdef int32_t i, item
    cdef token_t latest
    for i in range(names.size):
        names.tokens[i] = token_at(r.store, names.tokens[i])
    names.latest = 0 if r.inside else -1
    if r.latest == NIL:
        return
    latest = token_after(r.store, r.latest)
    for i in range(names.size):
        if names.tokens[i] == latest:
            names.latest = i
    if r.item == NO_ITEM or latest < 0 or names.latest >= 0:
        return
    item = child_of(r.store, r.place.item, latest)
    if item != NO_ITEM:
        names.tokens[names.size], names.counts[names.size] = latest, item_count(r.store, item)
        names.latest = names.size
        names.size += 1

cdef void read_names(Reading* readings, int32_t count) noexcept nogil:
    """How each of the contexts goes on."""
    cdef int32_t i, step
    for i in range(count):
        begin_reading(&readings[i])
    for step in range(NAMES - 1):
        for i in range(count):
            read_on(&readings[i])
    for i in range(count):
        end_reading(&readings[i])

cdef int32_t list_contexts(Sources* sources, const Contexts* contexts, Reading* out) noexcept nogil:
    """The contexts of all sources, the longest first; returns their number."""
    cdef int32_t next[SOURCES]
    cdef int32_t source, best, count = 0
    cdef const Context* context
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
        context = &contexts[best].at[next[best]]
        next[best] += 1
        out[count].store, out[count].source = sources.stores[best], best
        out[count].place = context.place
        out[count].shortest, out[count].longest = context.shortest, context.longest
        count += 1


# Candidates

cdef inline int32_t candidate(
    Expansion* e, token_t token, token_t vocab_size, int32_t source
) noexcept nogil:
    """Index of a token among the candidates, which it joins if there is room; −1 if not."""
    cdef int32_t i
    for i in range(e.size):
        if e.tokens[i] == token:
            return i
    if e.size >= CANDIDATES or token >= vocab_size:
        return -1
    e.tokens[e.size] = token
    e.sources[e.size] = source
    e.size += 1
    return e.size - 1

cdef void hear_names(
    Expansion* e, const Names* names, int32_t source, int32_t heard, token_t vocab_size, int32_t* named_by
) noexcept nogil:
    """Add what a context names to the candidates, with its evidence for each of them."""
    cdef int32_t i, k
    cdef int32_t* offsets = e.offsets[heard]
    for k in range(CANDIDATES):
        offsets[k] = -1
    for i in range(names.size):
        k = candidate(e, names.tokens[i], vocab_size, source)
        if k >= 0:
            offsets[k] = 2 * share_bucket(<float>names.counts[i] / names.support) + (i == names.latest)
            named_by[k] |= 1 << source
    e.others[heard] = 2 * (SHARES - 1) if names.alone else 0

cdef void hear_gap(
    Expansion* e, Store* s, const token_t* last, int32_t source, token_t vocab_size, int32_t* named_by
) noexcept nogil:
    """Add what followed the pair before the last token."""
    cdef int32_t witness = source * KINDS + ORDERS, heard = SOURCES * ORDERS + source
    cdef Names names
    if read_gap(s, last[1], last[2], &names):
        hear_names(e, &names, source, heard, vocab_size, named_by)
        e.rows[witness] = (witness * SUPPORTS + support_bucket(names.support)) * OFFSETS
        e.heard[witness] = heard

cdef void hear(
    Expansion* e, const Reading* r, int32_t heard, token_t vocab_size, int32_t* named_by
) noexcept nogil:
    """Add a context of the trie, for each order that it is as long as.

    In the text itself for the longest one alone: where a text copies, all lengths say the same.
    """
    cdef int32_t last = ORDER_OF[r.longest], order, witness
    hear_names(e, &r.names, r.source, heard, vocab_size, named_by)
    for order in range(ORDER_OF[r.shortest - 1] if r.source else last - 1, last):
        witness = r.source * KINDS + order
        e.rows[witness] = (witness * SUPPORTS + support_bucket(r.names.support)) * OFFSETS
        e.heard[witness] = heard

cdef void look_up(Expansion* e, const Reading* r, int32_t* offsets, int32_t* named_by) noexcept nogil:
    """Complete the evidence of a context that goes on in more ways than were read."""
    cdef Store* s = r.store
    cdef int32_t k, item
    for k in range(e.size):
        if offsets[k] < 0:
            prefetch(&s.slots[home_of(s, tag_of(r.place.item, e.tokens[k]))])
    for k in range(e.size):
        if offsets[k] >= 0:
            continue
        item = table_find(s, r.place.item, e.tokens[k])
        if item != NO_ITEM:
            offsets[k] = 2 * share_bucket(<float>item_count(s, item) / r.names.support)
            named_by[k] |= 1 << r.source

cdef inline int32_t longest_order(const Contexts* contexts) noexcept nogil:
    return ORDER_OF[contexts.at[0].longest] if contexts.count else 0

cdef void hear_copy(
    Expansion* e, Store* text, const Copy* copy, token_t vocab_size, int32_t* named_by
) noexcept nogil:
    """Add how a copy may go on."""
    cdef CopyNames names
    cdef int32_t i, k, witness
    name_copies(text, copy, &names)
    for i in range(COPIES):
        if names.tokens[i] < 0:
            continue
        witness = CONTEXTS + i
        for k in range(CANDIDATES):
            e.offsets[witness][k] = -1
        k = candidate(e, names.tokens[i], vocab_size, 0)
        if k >= 0:
            e.offsets[witness][k] = 1
            named_by[k] |= 1
        e.others[witness] = 0
        e.rows[witness] = COPY_CELL + (i * COPY_KINDS + names.kinds[i]) * 2
        e.heard[witness] = witness

cdef void gather(Sources* sources, const Contexts* contexts, const Copy* copy, Expansion* e) noexcept nogil:
    """The candidates, those of the longest contexts first, and their evidence."""
    cdef int32_t named_by[CANDIDATES]
    cdef Reading readings[WITNESSES]
    cdef int32_t i, source, count = list_contexts(sources, contexts, readings)
    memset(named_by, 0, sizeof(named_by))
    memset(e.rows, -1, sizeof(e.rows))
    e.size = 0
    read_names(readings, count)
    if sources.stores[0] != NULL:
        hear_copy(e, sources.stores[0], copy, sources.vocab_size, named_by)
    for i in range(count):
        hear(e, &readings[i], i, sources.vocab_size, named_by)
    for source in range(SOURCES):
        if sources.stores[source] != NULL:
            hear_gap(e, sources.stores[source], copy.last, source, sources.vocab_size, named_by)
    for i in range(count):
        if readings[i].item != NO_ITEM:
            look_up(e, &readings[i], e.offsets[i], named_by)
    for i in range(e.size):
        e.inputs[BOTH][i] = (named_by[i] & 1) != 0 and named_by[i] > 1
        e.inputs[BIAS][i] = 1
    e.memory_group = 1
    for source in range(1, SOURCES):
        e.memory_group = max(e.memory_group, 1 + longest_order(&contexts[source]))
    e.text_group = 2 + ORDERS + COPY_STATES * longest_order(&contexts[0]) + copy_state(copy)


# Scores

cdef inline float* weights_of(Mixture* m, int32_t group) noexcept nogil:
    return m.weights + group * INPUTS

cdef void score(Mixture* m, Expansion* e) noexcept nogil:
    """Probabilities of the candidates: the softmax of their scores and of 0, that of none of them."""
    cdef float* common = weights_of(m, 0)
    cdef float* memory = weights_of(m, e.memory_group)
    cdef float* text = weights_of(m, e.text_group)
    cdef int32_t j, k, offset, row
    cdef float weight, highest = 0, total
    for k in range(e.size):
        e.probs[k] = 0
    for j in range(INPUTS):
        weight = common[j] + memory[j] + text[j]
        if j < WITNESSES:
            row = e.rows[j]
            if row < 0:
                continue
            for k in range(e.size):
                offset = e.offsets[e.heard[j]][k]
                e.inputs[j][k] = m.logits[row + (e.others[e.heard[j]] if offset < 0 else offset)]
        for k in range(e.size):
            e.probs[k] += weight * e.inputs[j][k]
    for k in range(e.size):
        highest = max(highest, e.probs[k])
    total = expf(-highest)
    for k in range(e.size):
        e.probs[k] = expf(e.probs[k] - highest)
        total += e.probs[k]
    for k in range(e.size):
        e.probs[k] /= total

cdef void expand(
    Mixture* m, Sources* sources, const Contexts* contexts, const Copy* copy, Expansion* e
) noexcept nogil:
    gather(sources, contexts, copy, e)
    score(m, e)


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

cdef inline void step_text(Sources* sources, Copy* copy, token_t token) noexcept nogil:
    """The copy and the last tokens one token on."""
    if sources.stores[0] != NULL:
        step_copy(sources.stores[0], copy, token)
    copy.last[2], copy.last[1], copy.last[0] = copy.last[1], copy.last[0], token


# Learning

cdef inline void count_outcomes(Mixture* m, int32_t cell, int32_t trials, bint hit) noexcept nogil:
    """Learn that of so many candidates with a cell's evidence one was right, or none."""
    cdef Cell* c = &m.cells[cell]
    c.trials = min(c.trials + trials, MOST_TRIALS)
    c.prob += (hit - trials * c.prob) / (c.trials + 1.5)
    m.logits[cell] = log_odds(c.prob)

cdef void learn_cells(Mixture* m, const Expansion* e, int32_t right) noexcept nogil:
    cdef int32_t j, k, unnamed
    cdef bint hit
    cdef const int32_t* offsets
    for j in range(WITNESSES):
        if e.rows[j] < 0:
            continue
        offsets = e.offsets[e.heard[j]]
        unnamed, hit = 0, False
        for k in range(e.size):
            if offsets[k] >= 0:
                count_outcomes(m, e.rows[j] + offsets[k], 1, k == right)
            else:
                unnamed += 1
                hit |= k == right
        if unnamed:
            count_outcomes(m, e.rows[j] + e.others[e.heard[j]], unnamed, hit)

cdef void learn_weights(Mixture* m, const Expansion* e, int32_t right) noexcept nogil:
    cdef float* common = weights_of(m, 0)
    cdef float* memory = weights_of(m, e.memory_group)
    cdef float* text = weights_of(m, e.text_group)
    cdef int32_t j, k
    cdef float slope
    for j in range(INPUTS):
        if j < WITNESSES and e.rows[j] < 0:
            continue
        slope = 0
        for k in range(e.size):
            slope += ((k == right) - e.probs[k]) * e.inputs[j][k]
        slope *= m.rate
        common[j] += slope
        memory[j] += slope
        text[j] += slope

cdef void learn(Mixture* m, const Expansion* e, token_t token) noexcept nogil:
    """Learn that `token` was the one that followed."""
    cdef int32_t k, right = -1
    for k in range(e.size):
        if e.tokens[k] == token:
            right = k
    learn_weights(m, e, right)
    learn_cells(m, e, right)

cdef void learn_tokens(
    Mixture* m, Sources* sources, Contexts* contexts, Copy* copy, Trend* trend,
    const token_t[::1] token_ids, Expansion* e,
) noexcept nogil:
    """Learn from the tokens that followed `contexts`, which move along with them."""
    cdef Contexts next
    cdef Py_ssize_t i
    cdef int32_t source
    for i in range(token_ids.shape[0]):
        find_copy(sources, contexts, copy)
        expand(m, sources, contexts, copy, e)
        follow_trend(trend, e, token_ids[i])
        learn(m, e, token_ids[i])
        step_text(sources, copy, token_ids[i])
        for source in range(SOURCES):
            if sources.stores[source] != NULL:
                step_contexts(sources.stores[source], &contexts[source], token_ids[i], &next)
                contexts[source] = next
