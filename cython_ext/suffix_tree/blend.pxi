# How matches of several lengths, in one suffix tree or two, draft one tree of tokens.
#
# Every match is a *witness* of what may follow: the longest knows the context best, the shorter ones
# have seen more. They are asked in order of length, as in prediction by partial matching (Cleary and
# Witten, 1984), and a token is credited to the first witness that names it. How far to trust it is
# looked up by the kind of evidence, its class, and the tokens most likely to be accepted are drafted.
from suffix_tree.drafting cimport (
    Blend, Draft, Guess, LENGTH_BUCKETS, NAMES, RANKS, SHARE_BUCKETS, SUPPORT_BUCKETS,
    WITNESSES, Witness,
)
from suffix_tree.store cimport NO_ITEM, Place, Store, item_count, item_depth, label_token, node_at
from common.types cimport int32_t, token_t


cdef inline int32_t length_bucket(int32_t length) noexcept nogil:
    if length <= 4:
        return length - 1
    return 4 + (length > 6) + (length > 10) + (length > 20) + (length > 32) + (length > 64)


cdef inline int32_t support_bucket(int32_t support) noexcept nogil:
    return (support > 1) + (support > 2) + (support > 4) + (support > 9) + (support > 49)


cdef inline int32_t share_bucket(float share) noexcept nogil:
    return ((share > 0.02) + (share > 0.06) + (share > 0.15) + (share > 0.3) + (share >= 0.5)
            + (share > 0.7) + (share > 0.999))


cdef inline int32_t evidence_class(
    int32_t source, int32_t rank, int32_t length, int32_t support, int32_t count
) noexcept nogil:
    """Class of a token that `count` of `support` continuations of a match have."""
    cdef int32_t evidence = source * RANKS + (rank if rank < RANKS else RANKS - 1)
    evidence = evidence * LENGTH_BUCKETS + length_bucket(length)
    evidence = evidence * SUPPORT_BUCKETS + support_bucket(support)
    return evidence * SHARE_BUCKETS + share_bucket(<float>count / support)


cdef inline void queue(Blend* b, Guess guess) noexcept nogil:
    cdef int32_t i = b.queued
    b.queued += 1
    while i and b.heap[(i - 1) // 2].prob < guess.prob:
        b.heap[i] = b.heap[(i - 1) // 2]
        i = (i - 1) // 2
    b.heap[i] = guess


cdef Guess unqueue(Blend* b) noexcept nogil:
    cdef Guess top = b.heap[0], last
    cdef int32_t i = 0, child = 1
    b.queued -= 1
    last = b.heap[b.queued]
    while child < b.queued:
        if child + 1 < b.queued and b.heap[child + 1].prob > b.heap[child].prob:
            child += 1
        if b.heap[child].prob <= last.prob:
            break
        b.heap[i] = b.heap[child]
        i = child
        child = 2 * i + 1
    b.heap[i] = last
    return top


cdef inline bint goes_on(Store* s, Place at) noexcept nogil:
    return at.depth < item_depth(s, at.item) or (at.item >= 0 and node_at(s, at.item).children)


cdef int32_t choose_witnesses(
    Store* s, Place* matches, int32_t longest, int32_t source, Witness* out
) noexcept nogil:
    """The longest matches that differ in how they go on.

    Matches of equal count are the same occurrences. The shortest of them stands for the longest,
    since the tree ends at a depth that the match and what follows it share.
    """
    cdef int32_t length, chosen = 0, count, previous = 0
    for length in range(longest, 0, -1):
        count = item_count(s, matches[length].item)
        if count == previous and chosen:
            out[chosen - 1].unseen += out[chosen - 1].place.depth - length
            out[chosen - 1].place = matches[length]
        elif chosen == WITNESSES // 2:
            break
        elif goes_on(s, matches[length]):
            out[chosen] = Witness(s, matches[length], source, 0)
            chosen += 1
            previous = count
    return chosen


cdef inline int32_t match_length(Witness* w) noexcept nogil:
    return w.place.depth + w.unseen


cdef inline int32_t merge_witnesses(
    Witness* first, int32_t n, Witness* second, int32_t m, Witness* out
) noexcept nogil:
    """All of them by length; among equals, the first tree's first."""
    cdef int32_t i = 0, j = 0
    while i < n or j < m:
        if j == m or (i < n and match_length(&first[i]) >= match_length(&second[j])):
            out[i + j] = first[i]
            i += 1
        else:
            out[i + j] = second[j]
            j += 1
    return n + m


cdef inline bint named(token_t* names, int32_t count, token_t token) noexcept nogil:
    cdef int32_t i
    for i in range(count):
        if names[i] == token:
            return True
    return False


cdef int32_t ask(
    Blend* b, Witness* w, int32_t rank, int32_t parent, float prob, token_t* names, int32_t known
) noexcept nogil:
    """Queue what a witness names that `names` has not; returns the number of names then."""
    cdef Store* s = w.store
    cdef int32_t item = w.place.item, depth = w.place.depth, support, i
    cdef bint inside = depth < item_depth(s, item)
    cdef Guess guess
    if inside:
        support = item_count(s, item)
    elif item < 0:
        return known
    else:
        support = node_at(s, item).count - node_at(s, item).ends
        item = first_item(s, item)
    guess.parent = parent
    for i in range(NAMES):
        if item == NO_ITEM:
            break
        guess.token = label_token(s, item, depth + 1)
        guess.evidence = evidence_class(
            w.source, rank, match_length(w), support, item_count(s, item))
        guess.prob = prob * b.rates[guess.evidence]
        if guess.prob < b.min_prob:
            break
        if guess.token < b.vocab_size and not named(names, known, guess.token):
            names[known] = guess.token
            known += 1
            queue(b, guess)
        if inside:
            break
        item = next_item(s, item)
    return known


cdef inline void expand(Blend* b, int32_t node, float prob) noexcept nogil:
    """Queue the children of a drafted node (−1: of the root)."""
    cdef token_t[WITNESSES * NAMES] names
    cdef int32_t known = 0, rank
    cdef Witness* witnesses = b.witnesses + <size_t>(node + 1) * WITNESSES
    for rank in range(b.witness_counts[node + 1]):
        known = ask(b, &witnesses[rank], rank, node, prob, names, known)


cdef void draft_guess(Blend* b, Guess guess) noexcept nogil:
    """Make the guess a node; its witnesses are its parent's that go along with it."""
    cdef Witness* above = b.witnesses + <size_t>(guess.parent + 1) * WITNESSES
    cdef Witness* here = b.witnesses + <size_t>(b.size + 1) * WITNESSES
    cdef int32_t i, count = 0
    for i in range(b.witness_counts[guess.parent + 1]):
        here[count] = above[i]
        if step(here[count].store, &here[count].place, guess.token):
            count += 1
    b.tokens[b.size] = guess.token
    b.parents[b.size] = guess.parent
    b.probs[b.size] = guess.prob
    b.classes[b.size] = guess.evidence
    b.size += 1
    b.witness_counts[b.size] = count


cdef inline void blend(Blend* b) noexcept nogil:
    """Draft the guesses of highest probability, from the witnesses of the root."""
    cdef Guess guess
    b.size = b.queued = 0
    expand(b, -1, 1.0)
    while b.queued and b.size < b.budget:
        guess = unqueue(b)
        draft_guess(b, guess)
        if b.path:
            b.queued = 0
        expand(b, b.size - 1, guess.prob)
