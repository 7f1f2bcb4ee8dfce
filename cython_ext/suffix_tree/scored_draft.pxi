# Drafts by SuffixDecoding's Algorithm 1: the match whose draft has the highest score.


cdef bint below(
    Store* s, Place at, double prob, int32_t parent, bint paper, Candidate* out
) noexcept nogil:
    """The most frequent continuation of a place, if there is one."""
    cdef Node* v
    out.parent = parent
    out.place.depth = at.depth + 1
    if at.depth < item_depth(s, at.item):
        out.place.item = at.item
        out.prob, out.share = prob, 0
        return True
    out.place.item = first_item(s, at.item) if at.item >= 0 else NO_ITEM
    if out.place.item == NO_ITEM:
        return False
    v = node_at(s, at.item)
    out.share = prob / (v.count - v.ends if paper else v.count)
    out.prob = out.share * item_count(s, out.place.item)
    return True

cdef void queue_place(CandidateHeap* queue, const Candidate* candidate) noexcept nogil:
    queue.candidates[queue.made] = candidate[0]
    heap_push(queue.entries, &queue.size, Entry(candidate.prob, queue.made, queue.made))
    queue.made += 1

cdef void grow_draft(
    Store* s, Place at, int32_t budget, double min_prob, bint tree, bint paper, CandidateHeap* queue,
    Draft* draft,
) noexcept nogil:
    """Best first from a matched place; `queue` has room for 2 * `budget` + 1 candidates.

    Children come by descending count, so that each need only be queued once its elder is drafted.
    """
    cdef Candidate best, more
    queue.size = queue.made = 0
    draft.size, draft.score = 0, 0
    if below(s, at, 1.0, -1, paper, &more):
        queue_place(queue, &more)
    while queue.size and draft.size < budget and queue.entries[0].key >= min_prob:
        best = queue.candidates[heap_pop(queue.entries, &queue.size).index]
        draft.tokens[draft.size] = label_token(s, best.place.item, best.place.depth)
        draft.parents[draft.size] = best.parent
        draft.probs[draft.size] = best.prob
        draft.score += best.prob
        draft.size += 1
        if below(s, best.place, best.prob, draft.size - 1, paper, &more):
            queue_place(queue, &more)
        if tree and best.share > 0:
            best.place.item = next_item(s, best.place.item)
            if best.place.item != NO_ITEM:
                best.prob = best.share * item_count(s, best.place.item)
                queue_place(queue, &best)

cdef int32_t speculate(
    Store* s, Place* matches, int32_t longest, int32_t max_nodes, double factor, double offset,
    double min_prob, bint tree, bint paper, CandidateHeap* queue, Draft* best, Draft* spare,
) noexcept nogil:
    """The draft of highest score over the matched lengths 1 .. `longest`; returns its length or 0.

    `matches[L]` is where the last L tokens lead. From long to short, since ties go to the longer
    match, and ended where even a certain draft could not gain.
    """
    cdef int32_t length, chosen = 0, budget
    cdef Draft other
    best.size, best.score = 0, 0
    for length in range(longest, 0, -1):
        budget = <int32_t>min(<double>max_nodes, max(0.0, length * factor + offset + 1e-6))
        if budget <= best.score:
            if factor >= 0:
                break
            continue
        grow_draft(s, matches[length], budget, min_prob, tree, paper, queue, spare)
        if spare.score > best.score + 1e-9:  # sums that differ by rounding alone are a tie
            chosen = length
            other = best[0]
            best[0] = spare[0]
            spare[0] = other
    return chosen
