"""A depth-bounded, counted, path-compressed trie of the suffixes of growing token sequences.

Every suffix of every sequence is inserted down to `max_depth` tokens; a node counts the suffixes
through it (SuffixDecoding, https://arxiv.org/abs/2411.04975, section 3.1). A node is stored only where
suffixes part or stop. A suffix that shares no further token with another is a leaf, which grows with
its sequence at no cost, so that a new token moves only the suffixes that have occurred before: at most
`max_depth` of them, each in O(1).
"""

from typing import NamedTuple

import numpy as np

from libc.stdlib cimport free, malloc
from suffix_store cimport *
from types cimport int32_t, int64_t, token_t


# Growing

cdef int reserve_for_token(Store* s) noexcept nogil:
    """1: room for one more token at worst, 0: the byte limit is in the way, -1: no memory."""
    cdef int32_t moves = s.max_depth + 1
    cdef int room = pool_reserve(s, &s.nodes, moves, 2147483647)
    if room > 0:
        room = pool_reserve(s, &s.groups, 2 * moves, 2147483647)
    if room > 0:
        room = pool_reserve(s, &s.pages, 1, 2147483647 >> PAGE_BITS)
    if room > 0:
        room = table_reserve(s, 2 * moves)
    return room


cdef int32_t add_position(Store* s, int32_t sequence, token_t token) noexcept nogil:
    cdef Sequence* q = sequence_at(s, sequence)
    cdef int32_t offset = q.length % PAGE_TOKENS, page
    if offset == 0:
        page = pool_take(&s.pages)
        page_at(s, page).prev = q.last_page
        page_at(s, page).next = NIL
        page_at(s, page).owner = sequence
        page_at(s, page).index = q.length // PAGE_TOKENS
        if q.last_page == NIL:
            q.first_page = page
        else:
            page_at(s, q.last_page).next = page
        q.last_page = page
    q.length += 1
    page_at(s, q.last_page).tokens[offset] = token
    return (q.last_page << PAGE_BITS) + offset


cdef int32_t split(Store* s, int32_t node, token_t token, int32_t item) noexcept nogil:
    """A new node one token below `node`, on the way to its child `item`."""
    cdef int32_t middle = pool_take(&s.nodes), depth = node_at(s, node).depth + 1
    cdef Node* m = node_at(s, middle)
    m.depth = depth
    m.count = item_count(s, item)
    m.end = label_end(s, item, depth)
    m.ends = 0
    m.children = 1
    m.first_child = m.first_leaf = m.first_end = m.stale = NIL
    if branches(s, node):
        table_replace(s, node, token, item, middle)
    if item >= 0:
        take_place(s, item, middle)
        append_child(s, middle, item)
    else:
        drop(s, &node_at(s, node).first_leaf, ~item)
        m.parent = node
        append_child(s, node, middle)
        link_at(s, ~item).node = middle
        push(s, &m.first_leaf, ~item)
    return middle


cdef void fuse(Store* s, int32_t node, int32_t child) noexcept nogil:
    """Put the only item of `node`, an inner child of equal count, in its place."""
    cdef int32_t parent = node_at(s, node).parent
    if branches(s, parent):
        table_replace(
            s, parent, label_token(s, node, node_at(s, parent).depth + 1), node, child
        )
    leave_group(s, child)
    take_place(s, node, child)
    node_at(s, node).count = 0
    pool_release(&s.nodes, node)


cdef void stop_leaf(Store* s, int32_t node, int32_t leaf) noexcept nogil:
    """A leaf of `node` turned out to stop there: its sequence has not grown past it."""
    cdef Sequence* owner = sequence_at(s, page_of(s, leaf).owner)
    remove_leaf(s, node, leaf)
    add_end(s, node, leaf)
    if node_at(s, node).depth < s.max_depth and start_of(s, leaf) < owner.pending:
        owner.pending = start_of(s, leaf)


cdef int32_t descend(
    Store* s, int32_t node, int32_t suffix, token_t token, int32_t item
) noexcept nogil:
    """Move `suffix`, which stops at `node`, by one token towards the child `item`."""
    cdef Node* v = node_at(s, node)
    cdef int32_t depth = v.depth + 1
    cdef bint alone = v.children == 1 and v.ends == 1
    if item_depth(s, item) == depth and item >= 0:
        if node != ROOT:
            remove_end(s, node, suffix)
        if alone:
            fuse(s, node, item)
            node_at(s, item).count += 1
        else:
            raise_count(s, item)
        add_end(s, item, suffix)
        return item
    if alone:
        v.end = label_end(s, item, depth)
        v.depth = depth
    else:
        if node != ROOT:
            remove_end(s, node, suffix)
        node = split(s, node, token, item)
        raise_count(s, node)
        add_end(s, node, suffix)
    if item_depth(s, item) == depth:
        stop_leaf(s, node, ~item)
    return node


cdef void fetch_children(Store* s, int32_t suffix, int32_t count, token_t token) noexcept nogil:
    """Ask for the memory that looking up a token below `count` suffixes' nodes will read.

    The lookups do not depend on one another, so their cache misses need not queue up.
    """
    cdef int32_t i, node, item, position = suffix
    for i in range(count):
        node = ~link_at(s, position).node
        if branches(s, node):
            prefetch(&s.slots[home_of(s, tag_of(node, token))])
        if i + 1 < count:
            position = forward(s, position, 1)
    for i in range(count):
        node = ~link_at(s, suffix).node
        if branches(s, node):
            item = s.slots[home_of(s, tag_of(node, token))].item
            if item >= 0:
                prefetch(node_at(s, item))
            elif item != NO_ITEM:
                prefetch(link_at(s, ~item))
        if i + 1 < count:
            suffix = forward(s, suffix, 1)


cdef void append_token(Store* s, int32_t sequence, token_t token) noexcept nogil:
    """Move every pending suffix, the longest first: it becomes a leaf where it parts from all others."""
    cdef Sequence* q = sequence_at(s, sequence)
    cdef int32_t last = add_position(s, sequence, token)
    cdef int32_t start = q.pending, suffix, node, item
    node_at(s, ROOT).count += 1
    suffix = backward(s, last, q.length - 1 - start)
    link_at(s, last).node = ~ROOT
    fetch_children(s, suffix, q.length - start, token)
    while start < q.length:
        node = ~link_at(s, suffix).node
        item = child_of(s, node, token)
        if item == NO_ITEM:
            if node != ROOT:
                remove_end(s, node, suffix)
            add_leaf(s, node, token, suffix)
        else:
            node = descend(s, node, suffix, token, item)
        start += 1
        if item == NO_ITEM or node_at(s, node).depth == s.max_depth:
            q.pending = start
        if start < q.length:
            suffix = forward(s, suffix, 1)


# Shrinking

cdef void contract(Store* s, int32_t node) noexcept nogil:
    """Remove a node that has come to hold a single item."""
    cdef Node* v = node_at(s, node)
    cdef int32_t parent = v.parent, suffix
    cdef Sequence* owner
    if v.first_child != NIL:
        fuse(s, node, v.first_child)
        return
    suffix = v.first_leaf if v.first_leaf != NIL else v.first_end
    owner = sequence_at(s, page_of(s, suffix).owner)
    if v.first_leaf == NIL and start_of(s, suffix) >= owner.pending:
        owner.pending = start_of(s, suffix) + 1
    if branches(s, parent):
        table_replace(
            s, parent, label_token(s, node, node_at(s, parent).depth + 1), node, ~suffix
        )
    remove_child(s, node)
    link_at(s, suffix).node = parent
    push(s, &node_at(s, parent).first_leaf, suffix)
    v.count = 0
    pool_release(&s.nodes, node)


cdef inline bint holds_one_item(Store* s, int32_t node) noexcept nogil:
    cdef Node* v = node_at(s, node)
    if v.ends:
        return v.ends == 1 and v.first_child == NIL and v.first_leaf == NIL
    return not branches(s, node)


cdef int32_t some_suffix(Store* s, int32_t node) noexcept nogil:
    """A suffix at or below a node."""
    cdef Node* v = node_at(s, node)
    while v.first_leaf == NIL and v.first_end == NIL:
        v = node_at(s, v.first_child)
    return v.first_leaf if v.first_leaf != NIL else v.first_end


cdef int32_t remove_suffix(Store* s, int32_t suffix, int32_t sequence, int32_t stale) noexcept nogil:
    """Uncount a suffix. Nodes whose label is read from `sequence` join the chain that `stale` heads.

    Returns the chain's new head.
    """
    cdef int32_t node = link_at(s, suffix).node, above
    cdef Node* v
    if node >= 0:
        remove_leaf(s, node, suffix)
    else:
        node = ~node
        remove_end(s, node, suffix)
    above = node
    while above != ROOT:
        lower_count(s, above)
        v = node_at(s, above)
        if v.stale == NIL and page_of(s, v.end).owner == sequence:
            v.stale = stale
            stale = above
        above = v.parent
    node_at(s, ROOT).count -= 1
    if node != ROOT and holds_one_item(s, node):
        contract(s, node)
    return stale


cdef void reread_labels(Store* s, int32_t stale) noexcept nogil:
    """Read the labels of the chained nodes from suffixes that are still there."""
    cdef int32_t node
    cdef Node* v
    while stale != ROOT:
        node = stale
        v = node_at(s, node)
        stale = v.stale
        v.stale = NIL
        if v.count > 0:
            v.end = forward(s, some_suffix(s, node), v.depth - 1)


cdef void remove_sequence(Store* s, int32_t sequence) noexcept nogil:
    cdef Sequence* q = sequence_at(s, sequence)
    cdef int32_t stale = ROOT, page = q.first_page, following, i, size
    while page != NIL:
        size = min(q.length - page_at(s, page).index * PAGE_TOKENS, PAGE_TOKENS)
        for i in range(size):
            stale = remove_suffix(s, (page << PAGE_BITS) + i, sequence, stale)
        page = page_at(s, page).next
    reread_labels(s, stale)
    page = q.first_page
    while page != NIL:
        following = page_at(s, page).next
        pool_release(&s.pages, page)
        page = following
    pool_release(&s.sequences, sequence)
    q.first_page = NIL
    q.pending = NIL


# Reading

cdef struct Place:  # a point of the trie: `depth` tokens down the label of an item; the root is ROOT, 0
    int32_t item, depth


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


# Drafting

cdef struct Candidate:
    double prob
    double share    # probability of a sibling per count; 0 where the edge leaves no choice
    Place place
    int32_t parent  # drafted node


cdef struct Draft:
    int32_t size
    double score
    int32_t* tokens
    int32_t* parents
    double* probs


cdef inline void heap_push(Candidate* heap, int32_t size, Candidate candidate) noexcept nogil:
    cdef int32_t i = size
    while i and heap[(i - 1) // 2].prob < candidate.prob:
        heap[i] = heap[(i - 1) // 2]
        i = (i - 1) // 2
    heap[i] = candidate


cdef inline Candidate heap_pop(Candidate* heap, int32_t size) noexcept nogil:
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
        if spare.score > best.score:
            chosen = length
            other = best[0]
            best[0] = spare[0]
            spare[0] = other
    return chosen


cdef int32_t match_context(Store* s, const token_t[::1] context, Place* matches) noexcept nogil:
    """Fill `matches[1 ..]` with where the last tokens lead; returns the longest length that matches."""
    cdef Py_ssize_t n = context.shape[0], i
    cdef int32_t length
    for length in range(1, <int32_t>min(n, <Py_ssize_t>s.max_depth) + 1):
        matches[length].item = ROOT
        matches[length].depth = 0
        for i in range(n - length, n):
            if not step(s, &matches[length], context[i]):
                return length - 1
    return <int32_t>min(n, <Py_ssize_t>s.max_depth)


cdef int32_t match_sequence(Store* s, int32_t sequence, Place* matches) noexcept nogil:
    """The same for the end of a sequence: its pending suffixes are where they lead.

    Longer ones occur nowhere else and have no continuation.
    """
    cdef Sequence* q = sequence_at(s, sequence)
    cdef int32_t length, longest = q.length - q.pending, position
    if longest > 0:
        position = (q.last_page << PAGE_BITS) + (q.length - 1) % PAGE_TOKENS
    for length in range(1, longest + 1):
        matches[length].item = ~link_at(s, position).node
        matches[length].depth = length
        if length < longest:
            position = backward(s, position, 1)
    return longest


class Speculation(NamedTuple):
    """A draft: int32 `token_ids` [n], int32 `parents` [n] (−1: root), float32 `probs` [n]; the
    length of the match it continues (0: none) and its score, the sum of `probs`."""

    token_ids: np.ndarray
    parents: np.ndarray
    probs: np.ndarray
    match_length: int
    score: float


cdef class SuffixTree:
    """Suffixes of token sequences to a depth of `max_depth` tokens, with their counts.

    A token is appended in O(max_depth), whatever came before. With `max_bytes`, memory in use never
    exceeds that many bytes: `extend` stops short instead. Not safe for concurrent use.
    """

    cdef Store store
    cdef Place* matches
    cdef int32_t live

    def __cinit__(self, int max_depth=64, *, max_bytes=None):
        if not 1 <= max_depth <= 1 << 16:
            raise ValueError(f"max_depth: expected 1 to 65536, got {max_depth}")
        cdef Store* s = &self.store
        pool_init(&s.nodes, sizeof(Node))
        pool_init(&s.groups, sizeof(Group))
        pool_init(&s.pages, sizeof(Page))
        pool_init(&s.sequences, sizeof(Sequence))
        s.slots = NULL
        s.slot_count = s.slots_used = s.max_bytes = 0
        s.max_depth = max_depth
        self.matches = <Place*>malloc((max_depth + 1) * sizeof(Place))
        if self.matches == NULL or reserve_for_token(s) < 1:
            raise MemoryError
        cdef Node* root = node_at(s, pool_take(&s.nodes))
        root[0] = Node(
            parent=NIL, count=0, end=NIL, depth=0, ends=0, children=0, first_child=NIL, first_leaf=NIL,
            first_end=NIL, next=NIL, prev=NIL, group=NIL, stale=NIL,
        )
        if max_bytes is not None:
            if max_bytes < self.nbytes:
                raise ValueError(f"max_bytes: expected at least {self.nbytes}, got {max_bytes}")
            s.max_bytes = max_bytes

    def __dealloc__(self):
        free(self.store.nodes.data)
        free(self.store.groups.data)
        free(self.store.pages.data)
        free(self.store.sequences.data)
        free(self.store.slots)
        free(self.matches)

    @property
    def max_depth(self):
        """Longest suffix kept, in tokens."""
        return self.store.max_depth

    @property
    def nbytes(self):
        """Bytes allocated, spare capacity included."""
        return store_bytes(&self.store) + (self.store.max_depth + 1) * <int64_t>sizeof(Place)

    @property
    def token_count(self):
        """Tokens in all sequences."""
        return node_at(&self.store, ROOT).count

    def __len__(self):
        """Number of sequences."""
        return self.live

    def add_sequence(self):
        """Start an empty sequence and return its id, which may be a removed one's."""
        cdef Store* s = &self.store
        cdef int room = pool_reserve(s, &s.sequences, 1, 2147483647)
        if room < 1:
            raise MemoryError("no room for another sequence")
        cdef int32_t sequence = pool_take(&s.sequences)
        sequence_at(s, sequence)[0] = Sequence(length=0, first_page=NIL, last_page=NIL, pending=0)
        self.live += 1
        return sequence

    cdef int32_t _checked(self, int64_t sequence) except -1:
        if (not 0 <= sequence < self.store.sequences.used
                or sequence_at(&self.store, <int32_t>sequence).pending == NIL):
            raise ValueError(f"sequence: expected the id of one that is here, got {sequence}")
        return <int32_t>sequence

    def append(self, sequence, token_t token):
        """Append one token. Returns whether it fitted under `max_bytes`. O(max_depth)."""
        return self.extend(sequence, np.array([token], dtype=np.int32)) == 1

    def extend(self, sequence, const token_t[::1] token_ids):
        """Append tokens (int32 [n], not negative). Returns how many fitted under `max_bytes`."""
        cdef int32_t index = self._checked(sequence)
        cdef Py_ssize_t i = 0, n = token_ids.shape[0]
        cdef int room = 1
        for i in range(n):
            if token_ids[i] < 0:
                raise ValueError(f"token_ids: expected 0 or more, got {token_ids[i]}")
        with nogil:
            i = 0
            while i < n:
                room = reserve_for_token(&self.store)
                if room < 1:
                    break
                append_token(&self.store, index, token_ids[i])
                i += 1
        if room < 0:
            raise MemoryError
        return i

    def remove(self, sequence):
        """Forget a sequence and its counts. O(its length x max_depth)."""
        cdef int32_t index = self._checked(sequence)
        with nogil:
            remove_sequence(&self.store, index)
        self.live -= 1

    def tokens(self, sequence):
        """The tokens of a sequence, int32 [n]."""
        cdef Sequence* q = sequence_at(&self.store, self._checked(sequence))
        cdef int32_t page = q.first_page, i
        out = np.empty(q.length, dtype=np.int32)
        cdef token_t[::1] view = out
        for i in range(q.length):
            view[i] = page_at(&self.store, page).tokens[i % PAGE_TOKENS]
            if i % PAGE_TOKENS == PAGE_TOKENS - 1:
                page = page_at(&self.store, page).next
        return out

    cdef bint _find(self, const token_t[::1] token_ids, Place* at) noexcept:
        cdef Py_ssize_t i
        at.item, at.depth = ROOT, 0
        for i in range(token_ids.shape[0]):
            if not step(&self.store, at, token_ids[i]):
                return False
        return True

    def count(self, const token_t[::1] token_ids):
        """How often the tokens (at most `max_depth` of them) occur; all tokens, for none."""
        cdef Place at
        return item_count(&self.store, at.item) if self._find(token_ids, &at) else 0

    def children(self, const token_t[::1] token_ids):
        """(token, count) of every token that follows the given ones, by descending count."""
        cdef Place at
        cdef int32_t item, depth
        if not self._find(token_ids, &at):
            return []
        depth = at.depth + 1
        if at.depth < item_depth(&self.store, at.item):
            return [(label_token(&self.store, at.item, depth), item_count(&self.store, at.item))]
        item = first_item(&self.store, at.item) if at.item >= 0 else NO_ITEM
        found = []
        while item != NO_ITEM:
            found.append((label_token(&self.store, item, depth), item_count(&self.store, item)))
            item = next_item(&self.store, item)
        return found

    def speculate(
        self, const token_t[::1] context, int max_nodes, *, double factor=1.0, double offset=0.0,
        double min_prob=0.1, bint tree=True, str convention="arctic",
    ):
        """The best continuation of the last 1, 2, .. tokens of `context` (Algorithm 1).

        A match of L tokens drafts at most min(max_nodes, L * factor + offset) nodes, the most
        probable first (`tree`) or along the most frequent children (a path), none below `min_prob`.
        A child's probability is its parent's times its count over its parent's count ("arctic") or
        over the sum of the siblings' counts ("paper", C(N)). The highest sum of probabilities
        wins, and among equals the longer match.
        """
        cdef int32_t longest
        with nogil:
            longest = match_context(&self.store, context, self.matches)
        return self._speculation(longest, max_nodes, factor, offset, min_prob, tree, convention)

    def speculate_after(
        self, sequence, int max_nodes, *, double factor=1.0, double offset=0.0,
        double min_prob=0.1, bint tree=True, str convention="arctic",
    ):
        """`speculate` with a sequence's own tokens as the context, which costs no matching."""
        cdef int32_t longest = match_sequence(
            &self.store, self._checked(sequence), self.matches)
        return self._speculation(longest, max_nodes, factor, offset, min_prob, tree, convention)

    cdef object _speculation(
        self, int32_t longest, int max_nodes, double factor, double offset, double min_prob,
        bint tree, str convention,
    ):
        cdef int32_t budget = max(max_nodes, 0), chosen
        cdef bint paper = convention == "paper"
        cdef Draft best, spare
        if convention not in ("paper", "arctic"):
            raise ValueError(f"convention: expected 'paper' or 'arctic', got {convention!r}")
        tokens, parents = np.empty((2, budget), np.int32), np.empty((2, budget), np.int32)
        probs = np.empty((2, budget), np.float64)
        cdef token_t[:, ::1] token_rows = tokens
        cdef int32_t[:, ::1] parent_rows = parents
        cdef double[:, ::1] prob_rows = probs
        cdef Candidate* heap = <Candidate*>malloc((budget + 2) * sizeof(Candidate))
        if heap == NULL:
            raise MemoryError
        if budget:
            best.tokens, spare.tokens = &token_rows[0, 0], &token_rows[1, 0]
            best.parents, spare.parents = &parent_rows[0, 0], &parent_rows[1, 0]
            best.probs, spare.probs = &prob_rows[0, 0], &prob_rows[1, 0]
        with nogil:
            chosen = speculate(
                &self.store, self.matches, longest, budget, factor, offset, min_prob, tree, paper,
                heap, &best, &spare,
            )
        free(heap)
        row = 1 if budget and best.tokens == &token_rows[1, 0] else 0
        return Speculation(
            tokens[row, :best.size], parents[row, :best.size],
            probs[row, :best.size].astype(np.float32), chosen, best.score,
        )

    def check_invariants(self):
        """Raise AssertionError where the structure contradicts itself. For tests: slow."""
        cdef int32_t node, children = 0, nodes = 0
        cdef Store* s = &self.store
        waiting = [ROOT]
        while waiting:
            node = waiting.pop()
            nodes += 1
            items = self._items(node)
            self._check_counts(node, items)
            self._check_siblings(node)
            for item in items:
                assert item_parent(s, item) == node, "a child of another node"
                assert item_depth(s, item) > node_at(s, node).depth, "an edge without a token"
                assert self._label(item)[:node_at(s, node).depth] == self._label(node), "labels"
                assert child_of(s, node, label_token(s, item, node_at(s, node).depth + 1)) == item
            children += len(items) if branches(s, node) else 0
            waiting.extend(item for item in items if item >= 0)
        assert nodes == s.nodes.used - s.nodes.free_count, "nodes that are not in the tree"
        assert children == s.slots_used, "table entries that are not in the tree"
        self._check_sequences()

    cdef list _items(self, int32_t node):
        cdef int32_t item = first_item(&self.store, node)
        found = []
        while item != NO_ITEM:
            found.append(item)
            item = next_item(&self.store, item)
        return found

    cdef list _label(self, int32_t item):
        cdef int32_t depth
        return [
            label_token(&self.store, item, depth)
            for depth in range(1, item_depth(&self.store, item) + 1)
        ]

    cdef object _check_counts(self, int32_t node, list items):
        cdef Node* v = node_at(&self.store, node)
        cdef int32_t end = v.first_end, ends = 0
        counts = [item_count(&self.store, item) for item in items]
        while end != NIL:
            assert link_at(&self.store, end).node == ~node, "an end of another node"
            ends += 1
            end = link_at(&self.store, end).next
        assert v.children == len(items), "children are counted wrong"
        assert v.ends == ends, "ends are counted wrong"
        assert v.count == ends + sum(counts), "a count that its items do not add up to"
        assert counts == sorted(counts, reverse=True), "children out of order"
        assert node == ROOT or ends + len(items) > 1, "a node without need"
        assert v.stale == NIL, "a label left unread"

    cdef object _check_siblings(self, int32_t node):
        cdef Group* group
        cdef Store* s = &self.store
        cdef int32_t child = node_at(s, node).first_child, last = NIL
        while child != NIL:
            group = group_at(s, node_at(s, child).group)
            if last == NIL or node_at(s, last).count != node_at(s, child).count:
                assert group.first == child, "a group that starts elsewhere"
            else:
                assert node_at(s, last).group == node_at(s, child).group, "a divided group"
            last = child
            child = node_at(s, child).next
            if child == NIL or node_at(s, child).count != node_at(s, last).count:
                assert group.last == last, "a group that stops elsewhere"
        if last != NIL:
            assert node_at(s, node_at(s, node).first_child).prev == last, "the last sibling"

    cdef object _check_sequences(self):
        cdef Store* s = &self.store
        cdef int32_t i, j, position, node, total = 0, pages = 0, length
        for i in range(s.sequences.used):
            if sequence_at(s, i).pending == NIL:
                continue
            length = sequence_at(s, i).length
            total += length
            pages += (length + PAGE_TOKENS - 1) // PAGE_TOKENS
            for j in range(length):
                position = forward(s, sequence_at(s, i).first_page << PAGE_BITS, j)
                assert start_of(s, position) == j, "pages out of order"
                node = link_at(s, position).node
                if node < 0 and node_at(s, ~node).depth < s.max_depth:
                    assert j >= sequence_at(s, i).pending, "a suffix that would not move"
                    assert node_at(s, ~node).depth == length - j, "a suffix that stops too early"
                else:
                    assert j < sequence_at(s, i).pending, "a suffix that cannot move"
        assert total == node_at(s, ROOT).count, "tokens are counted wrong"
        assert pages == s.pages.used - s.pages.free_count, "pages that are not in the tree"
