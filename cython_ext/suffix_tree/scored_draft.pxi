# Drafts by SuffixDecoding's Algorithm 1: the match whose draft has the highest score.
from suffix_tree.drafting cimport Candidate, Draft
from suffix_tree.store cimport (
    NO_ITEM, Node, Place, Store, item_count, item_depth, label_token, node_at,
)
from common.types cimport int32_t


cdef inline void heap_push(Candidate* heap, int32_t size, Candidate candidate) noexcept nogil:
    cdef int32_t i = size
    while i and heap[(i - 1) // 2].prob < candidate.prob:
        heap[i] = heap[(i - 1) // 2]
        i = (i - 1) // 2
    heap[i] = candidate

cdef Candidate heap_pop(Candidate* heap, int32_t size) noexcept nogil:
    cdef Candidate top = heap[0], last = heap[size - 1]
    cdef int32_t i = 0, child = 1
    size -= 1
    while child < size:
        if child + 1 < size and heap[child + 1].prob > heap[child].prob:
            child += 1
        if heap[child].prob <= last.prob:
            break
        heap[i] = heap[child]
        i = child
        child = 2 * i + 1
    heap[i] = last
    return top

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

cdef void grow_draft(
    Store* s, Place at, int32_t budget, double min_prob, bint tree, bint paper, Candidate* heap,
    Draft* draft,
) noexcept nogil:
    """Best first from a matched place; `heap` has room for `budget` + 2 candidates.

    Children come by descending count, so that each need only be queued once its elder is drafted.
    """
    cdef int32_t queued = 0
    cdef Candidate best, more
    draft.size, draft.score = 0, 0
    if below(s, at, 1.0, -1, paper, &more):
        heap_push(heap, 0, more)
        queued = 1
    while queued and draft.size < budget and heap[0].prob >= min_prob:
        best = heap_pop(heap, queued)
        queued -= 1
        draft.tokens[draft.size] = label_token(s, best.place.item, best.place.depth)
        draft.parents[draft.size] = best.parent
        draft.probs[draft.size] = best.prob
        draft.score += best.prob
        draft.size += 1
        if below(s, best.place, best.prob, draft.size - 1, paper, &more):
            heap_push(heap, queued, more)
            queued += 1
        if tree and best.share > 0:
            best.place.item = next_item(s, best.place.item)
            if best.place.item != NO_ITEM:
                best.prob = best.share * item_count(s, best.place.item)
                heap_push(heap, queued, best)
                queued += 1

cdef int32_t speculate(
    Store* s, Place* matches, int32_t longest, int32_t max_nodes, double factor, double offset,
    double min_prob, bint tree, bint paper, Candidate* heap, Draft* best, Draft* spare,
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
        grow_draft(s, matches[length], budget, min_prob, tree, paper, heap, spare)
        if spare.score > best.score + 1e-9:  # sums that differ by rounding alone are a tie
            chosen = length
            other = best[0]
            best[0] = spare[0]
            spare[0] = other
    return chosen
