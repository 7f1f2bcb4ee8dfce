# Where the end of a text leads, and drafts by SuffixDecoding's Algorithm 1: of all its matches the one
# whose draft has the highest score.

cdef struct Option:  # a node that may be drafted
    double prob
    double share    # probability of a sibling per count; 0 where the edge leaves no choice
    Place place
    int32_t parent  # drafted node

cdef struct ScoredDraft:
    int32_t size
    double score
    int32_t* tokens
    int32_t* parents
    double* probs

cdef struct Search:
    Store* store
    Place* matches         # [max_depth], where the last 1, 2, .. tokens lead
    int32_t most           # nodes
    double alpha           # a match of p tokens makes a tree of alpha * p nodes, the matched one counted
    Option* candidates  # [2 * most + 1]
    Entry* queue           # those not drafted
    int32_t made, queued   # candidates, and entries
    ScoredDraft best, spare


cdef bint step(Store* s, Place* at, token_t token) noexcept nogil:
    """Move one token down, if the trie goes on so."""
    cdef int32_t item
    if at.depth < item_depth(s, at.item):
        if label_token(s, at.item, at.depth + 1) != token:
            return False
    elif at.item < 0:
        return False
    else:
        item = child_of(s, at.item, token)
        if item == NO_ITEM:
            return False
        at.item = item
    at.depth += 1
    return True

cdef int32_t match_tokens(
    Store* s, const token_t* last, int32_t count, Place* matches, int32_t n
) noexcept nogil:
    """Where the last tokens of a text lead, by lengths that rise; returns how many of them match.

    The n lengths stand as depths in `matches`, the last `count` tokens in `last`.
    """
    cdef Place at
    cdef int32_t k, i
    for k in range(n):
        if matches[k].depth > min(count, s.max_depth):
            return k
        at.item, at.depth = ROOT, 0
        for i in range(count - matches[k].depth, count):
            if not step(s, &at, last[i]):
                return k
        matches[k] = at
    return n

cdef int32_t match_sequence(Store* s, int32_t sequence, Place* matches, int32_t n) noexcept nogil:
    """The same for the end of a sequence: its pending suffixes are where they lead.

    Longer ones occur nowhere else and have no continuation.
    """
    cdef Sequence* q = sequence_at(s, sequence)
    cdef int32_t longest = q.length - q.pending, length = 1, k
    cdef int32_t position = (q.last_page << PAGE_BITS) + (q.length - 1) % PAGE_TOKENS
    for k in range(n):
        if matches[k].depth > longest:
            return k
        position = backward(s, position, matches[k].depth - length)
        length = matches[k].depth
        matches[k].item = ~link_at(s, position).node
    return n

cdef bint below(Store* s, Place at, double prob, int32_t parent, Option* out) noexcept nogil:
    """The most frequent continuation of a place, if there is one.

    A child has its parent's probability times its share of the siblings' counts (the paper's C(N)).
    """
    out.parent = parent
    out.place.depth = at.depth + 1
    if at.depth < item_depth(s, at.item):
        out.place.item = at.item
        out.prob, out.share = prob, 0
        return True
    out.place.item = first_item(s, at.item) if at.item >= 0 else NO_ITEM
    if out.place.item == NO_ITEM:
        return False
    out.share = prob / (node_at(s, at.item).count - node_at(s, at.item).ends)
    out.prob = out.share * item_count(s, out.place.item)
    return True

cdef void queue_place(Search* q, const Option* candidate) noexcept nogil:
    q.candidates[q.made] = candidate[0]
    heap_push(q.queue, &q.queued, Entry(candidate.prob, q.made, q.made))
    q.made += 1

cdef void grow_draft(Search* q, Place at, int32_t budget) noexcept nogil:
    """Fill `spare` best first from a matched place.

    The matched node counts in the score, D(N_p) = 1. Children come by descending count, so that each
    need only be queued once its elder is drafted.
    """
    cdef Option best, more
    cdef ScoredDraft* draft = &q.spare
    q.queued = q.made = 0
    draft.size, draft.score = 0, 1
    if below(q.store, at, 1.0, -1, &more):
        queue_place(q, &more)
    while q.queued and draft.size < budget:
        best = q.candidates[heap_pop(q.queue, &q.queued).index]
        draft.tokens[draft.size] = label_token(q.store, best.place.item, best.place.depth)
        draft.parents[draft.size] = best.parent
        draft.probs[draft.size] = best.prob
        draft.score += best.prob
        draft.size += 1
        if below(q.store, best.place, best.prob, draft.size - 1, &more):
            queue_place(q, &more)
        if best.share > 0:
            best.place.item = next_item(q.store, best.place.item)
            if best.place.item != NO_ITEM:
                best.prob = best.share * item_count(q.store, best.place.item)
                queue_place(q, &best)

cdef int32_t search(Search* q, const token_t[::1] context, int32_t sequence) noexcept nogil:
    """Fill `best` with the draft of highest score behind a context, or behind a sequence.

    The paper tries p = 1, 2, .. and keeps a tree only for one of a higher score, so among equals the
    shortest match stays. The other way round, the search ends where even a certain draft could not
    gain. Returns the length of the match, or 0.
    """
    cdef int32_t length, longest = 0, chosen = 0, budget, most = q.store.max_depth
    for length in range(most):
        q.matches[length].depth = length + 1
    if sequence != NIL:
        longest = match_sequence(q.store, sequence, q.matches, most)
    elif context.shape[0]:
        longest = match_tokens(q.store, &context[0], <int32_t>context.shape[0], q.matches, most)
    for length in range(longest, 0, -1):
        budget = <int32_t>min(<double>q.most, max(0.0, ceil(length * q.alpha - 1e-6) - 1))
        # Sums that differ by rounding alone are a tie.
        if 1 + budget < q.best.score - 1e-9:
            break
        grow_draft(q, q.matches[length - 1], budget)
        if q.spare.score >= q.best.score - 1e-9:
            chosen = length
            q.best, q.spare = q.spare, q.best
    return chosen
