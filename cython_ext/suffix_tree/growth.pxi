# How the suffix tree takes in a token and lets go of a sequence.

# Gaps: how texts went on after two tokens and any third: what the trie, which has whole contexts only,
# cannot tell. A table of at most GAPS_LIMIT entries counts the most frequent continuations of each
# such pair. Where pairs contend for a place, the one that was seen more often keeps it.

cdef enum:
    GAPS_AT_FIRST = 256
    GAPS_LIMIT = 16384  # 32 bytes each
    MOST_COUNTED = 60000


@cython.overflowcheck(False)
cdef inline uint32_t gap_tag(token_t second, token_t third) noexcept nogil:
    """A pair's tag, not 0; `second` and `third` from the end of the text."""
    cdef uint64_t h = (<uint64_t>second << 32 | <uint32_t>third) * 0x9E3779B97F4A7C15ULL
    h ^= h >> 32
    h *= 0xD6E8FEB86659FD93ULL
    return <uint32_t>(h >> 32) | 1

cdef inline Gap* gap_home(Store* s, uint32_t tag, int32_t which) noexcept nogil:
    """One of the two entries, side by side, that a pair may have."""
    return &s.gaps[((tag >> 1) & <uint32_t>(s.gap_count - 1)) ^ <uint32_t>which]

cdef inline Gap* gap_find(Store* s, uint32_t tag) noexcept nogil:
    cdef int32_t which
    for which in range(2):
        if gap_home(s, tag, which).tag == tag:
            return gap_home(s, tag, which)
    return NULL

cdef inline Gap* weaker_home(Store* s, uint32_t tag) noexcept nogil:
    cdef Gap* first = gap_home(s, tag, 0)
    cdef Gap* other = gap_home(s, tag, 1)
    return other if other.total < first.total else first

cdef int gaps_reserve(Store* s) except -1 nogil:
    """Grow the table where it is half full, unless a larger one does not fit under the byte limit."""
    cdef int32_t old_count = s.gap_count, i
    cdef int32_t count = max(2 * old_count, <int32_t>GAPS_AT_FIRST)
    cdef Gap* old = s.gaps
    cdef Gap* gap
    if 2 * s.gaps_used < old_count or count > GAPS_LIMIT or not fits(s, count * <int64_t>sizeof(Gap)):
        return 0
    s.gaps = <Gap*>resized(NULL, count * sizeof(Gap))
    s.gap_count, s.gaps_used = count, 0
    memset(s.gaps, 0, count * sizeof(Gap))
    for i in range(old_count):
        gap = weaker_home(s, old[i].tag)
        if gap.total < old[i].total:
            s.gaps_used += gap.tag == 0
            gap[0] = old[i]
    free(old)
    return 0

cdef inline int32_t names_of(const Gap* gap) noexcept nogil:
    cdef int32_t k = 0
    while k < GAP_NAMES and gap.counts[k]:
        k += 1
    return k

cdef Gap* gap_for(Store* s, uint32_t tag) noexcept nogil:
    """The entry of a pair; NULL where others keep the places, each time at the price of a count."""
    cdef Gap* gap = gap_find(s, tag)
    if gap != NULL:
        return gap
    gap = weaker_home(s, tag)
    if gap.total > 1:
        gap.total -= 1
        if gap.counts[0]:
            gap.counts[names_of(gap) - 1] -= 1
        return NULL
    s.gaps_used += gap.tag == 0
    memset(gap, 0, sizeof(Gap))
    gap.tag = tag
    return gap

cdef inline void swap_names(Gap* gap, int32_t k) noexcept nogil:
    cdef token_t token = gap.tokens[k]
    cdef uint16_t count = gap.counts[k]
    gap.tokens[k], gap.counts[k] = gap.tokens[k - 1], gap.counts[k - 1]
    gap.tokens[k - 1], gap.counts[k - 1] = token, count

cdef void count_gap(Gap* gap, token_t token) noexcept nogil:
    cdef int32_t k = 0
    if gap.total >= MOST_COUNTED:
        return
    gap.total += 1
    while k < GAP_NAMES - 1 and gap.counts[k] and gap.tokens[k] != token:
        k += 1
    if gap.tokens[k] != token and gap.counts[k] > 1:
        gap.counts[k] -= 1
        gap.latest = GAP_NAMES
        return
    if gap.tokens[k] != token:
        gap.tokens[k], gap.counts[k] = token, 0
    gap.counts[k] += 1
    while k and gap.counts[k] > gap.counts[k - 1]:
        swap_names(gap, k)
        k -= 1
    gap.latest = k

cdef void note_gap(Store* s, int32_t sequence, token_t token) noexcept nogil:
    """Count that a sequence, to which it is not appended yet, goes on with a token."""
    cdef Sequence* q = sequence_at(s, sequence)
    cdef int32_t position
    cdef Gap* gap
    if q.length < 3 or not s.gap_count:
        return
    position = (q.last_page << PAGE_BITS) + (q.length - 1) % PAGE_TOKENS
    position = backward(s, position, 1)
    gap = gap_for(s, gap_tag(token_at(s, position), token_at(s, backward(s, position, 1))))
    if gap != NULL:
        count_gap(gap, token)

cdef void forget_gap(Store* s, token_t third, token_t second, token_t token) noexcept nogil:
    cdef Gap* gap = gap_find(s, gap_tag(second, third)) if s.gap_count else NULL
    cdef int32_t k, named = 0
    if gap == NULL:
        return
    for k in range(GAP_NAMES):
        named += gap.counts[k]
    gap.latest = GAP_NAMES
    for k in range(names_of(gap)):
        if gap.tokens[k] == token:
            gap.total -= 1
            gap.counts[k] -= 1
            while k < GAP_NAMES - 1 and gap.counts[k + 1] > gap.counts[k]:
                k += 1
                swap_names(gap, k)
            return
    gap.total -= gap.total > named  # one of those that are not named

cdef void forget_gaps(Store* s, int32_t sequence) noexcept nogil:
    """Take back what a sequence has counted."""
    cdef Sequence* q = sequence_at(s, sequence)
    cdef int32_t position, i
    cdef token_t[4] last
    if q.length < 4:
        return
    position = q.first_page << PAGE_BITS
    for i in range(q.length):
        last[i & 3] = token_at(s, position)
        if i > 2:
            forget_gap(s, last[(i - 3) & 3], last[(i - 2) & 3], last[i & 3])
        if i + 1 < q.length:
            position = forward(s, position, 1)

cdef inline const Gap* gap_after(Store* s, token_t second, token_t third) noexcept nogil:
    """The entry of a pair; NULL where there is none, or fewer than three tokens."""
    return gap_find(s, gap_tag(second, third)) if s.gap_count and third >= 0 else NULL

cdef inline void fetch_gap(Store* s, token_t second, token_t third) noexcept nogil:
    """Ask for the entry of a pair."""
    if s.gap_count:
        prefetch(gap_home(s, gap_tag(second, third), 0))


# Growing

cdef inline bint reserve_for_token(Store* s) except -1 nogil:
    """Make room for one more token at worst; False: the byte limit is in the way."""
    cdef int32_t moves = s.max_depth + 1
    cdef int32_t groups = pool_size(&s.nodes) // 2 + moves  # two nodes at least in each, whatever is removed
    if (pool_reserve(s, &s.nodes, moves, 2147483647)
            and pool_reserve(s, &s.groups, groups - pool_size(&s.groups), 2147483647)
            and pool_reserve(s, &s.pages, 1, 2147483647 >> PAGE_BITS)
            and table_reserve(s, 2 * moves)):
        gaps_reserve(s)
        return True
    return False

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

cdef inline void add_end(Store* s, int32_t node, int32_t position) noexcept nogil:
    link_at(s, position).node = ~node
    node_at(s, node).ends += 1
    push(s, &node_at(s, node).first_end, position)

cdef inline void remove_end(Store* s, int32_t node, int32_t position) noexcept nogil:
    node_at(s, node).ends -= 1
    drop(s, &node_at(s, node).first_end, position)

cdef void take_place(Store* s, int32_t child, int32_t by) noexcept nogil:
    """Put `by`, of equal count, among the siblings where `child` is."""
    cdef Node* c = node_at(s, child)
    cdef Node* b = node_at(s, by)
    b.parent, b.group = c.parent, c.group
    insert_before(s, by, child)
    unlink(s, child)
    if c.group != NIL and group_at(s, c.group).first == child:
        group_at(s, c.group).first = by
    elif c.group != NIL and group_at(s, c.group).last == child:
        group_at(s, c.group).last = by

cdef int32_t split(Store* s, int32_t node, int32_t item) noexcept nogil:
    """A new node one token below `node`, on the way to its child `item`, for one more suffix."""
    cdef int32_t middle = pool_take(&s.nodes), depth = node_at(s, node).depth + 1
    cdef Node* m = node_at(s, middle)
    m.depth = depth
    m.count = item_count(s, item)
    m.end = label_end(s, item, depth)
    m.ends = 0
    m.children = 1
    touch(s, middle)
    m.first_child = m.first_leaf = m.first_end = m.stale = NIL
    table_replace(s, node, item, middle)
    if item >= 0:
        take_place(s, item, middle)
        append_child(s, middle, item)
        raise_count(s, middle)
    else:
        m.count = 2
        drop(s, &node_at(s, node).first_leaf, ~item)
        m.parent = node
        append_child(s, node, middle)
        link_at(s, ~item).node = middle
        push(s, &m.first_leaf, ~item)
    return middle

cdef inline void fuse(Store* s, int32_t node, int32_t child) noexcept nogil:
    """Put the only item of `node`, an inner child of equal count, in its place."""
    table_replace(s, node_at(s, node).parent, node, child)
    take_place(s, node, child)
    node_at(s, node).count = 0
    pool_release(&s.nodes, node)

cdef inline void stop_leaf(Store* s, int32_t node, int32_t leaf) noexcept nogil:
    """A leaf of `node` turned out to stop there: its sequence has not grown past it."""
    cdef Sequence* owner = sequence_at(s, page_of(s, leaf).owner)
    remove_leaf(s, node, leaf)
    add_end(s, node, leaf)
    if node_at(s, node).depth < s.max_depth and start_of(s, leaf) < owner.pending:
        owner.pending = start_of(s, leaf)

cdef int32_t descend(Store* s, int32_t node, int32_t suffix, int32_t item) noexcept nogil:
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
        node = split(s, node, item)
        add_end(s, node, suffix)
    if item_depth(s, item) == depth:
        stop_leaf(s, node, ~item)
    return node

cdef inline void fetch_item(Store* s, int32_t item) noexcept nogil:
    if item >= 0:
        prefetch(node_at(s, item))
    elif item != NO_ITEM:
        prefetch(link_at(s, ~item))
        prefetch(page_of(s, ~item))

cdef inline void fetch_slot(Store* s, int32_t node, token_t token) noexcept nogil:
    prefetch(&s.slots[home_of(s, tag_of(node, token))])

cdef inline void fetch_children(Store* s, int32_t suffix, int32_t count, token_t token) noexcept nogil:
    """Ask for the items below `count` suffixes' nodes, so that their cache misses do not queue up."""
    cdef int32_t i, node, item
    for i in range(count):
        node = ~link_at(s, suffix).node
        item = s.slots[home_of(s, tag_of(node, token))].item if branches(s, node) else first_item(s, node)
        fetch_item(s, item)
        if i + 1 < count:
            suffix = forward(s, suffix, 1)

cdef void append_token(Store* s, int32_t sequence, token_t token, token_t following) noexcept nogil:
    """Move every pending suffix, the longest first: it becomes a leaf where it parts from all others.

    `following` is the token that is likely to be appended next; its lookups are prepared.
    """
    note_gap(s, sequence, token)
    cdef Sequence* q = sequence_at(s, sequence)
    cdef int32_t last = add_position(s, sequence, token)
    cdef int32_t start = q.pending, suffix, node, item
    cdef int32_t before = backward(s, last, 1) if q.length > 1 else NIL
    node_at(s, ROOT).count += 1
    suffix = backward(s, last, q.length - 1 - start)
    link_at(s, last).node = ~ROOT
    fetch_slot(s, ROOT, following)
    fetch_children(s, suffix, q.length - start, token)
    while start < q.length:
        node = ~link_at(s, suffix).node
        item = child_of(s, node, token)
        if node != ROOT:
            node_at(s, node).end = before
        touch(s, node)
        if item == NO_ITEM:
            if node != ROOT:
                remove_end(s, node, suffix)
            add_leaf(s, node, token, suffix)
        else:
            node = descend(s, node, suffix, item)
            fetch_slot(s, node, following)
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
    table_replace(s, parent, node, ~suffix)
    leave_group(s, node)
    unlink(s, node)
    link_at(s, suffix).node = parent
    push(s, &node_at(s, parent).first_leaf, suffix)
    v.count = 0
    pool_release(&s.nodes, node)

cdef inline bint holds_one_item(Store* s, int32_t node) noexcept nogil:
    cdef Node* v = node_at(s, node)
    if v.ends:
        return v.ends == 1 and v.first_child == NIL and v.first_leaf == NIL
    return not branches(s, node)

cdef inline int32_t some_suffix(Store* s, int32_t node) noexcept nogil:
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
    touch(s, node)
    above = node
    while above != ROOT:
        lower_count(s, above)
        v = node_at(s, above)
        if v.stale == NIL and page_of(s, v.end).owner == sequence:
            v.stale = stale
            stale = above
        above = v.parent
        touch(s, above)
    node_at(s, ROOT).count -= 1
    if node != ROOT and holds_one_item(s, node):
        contract(s, node)
    return stale

cdef inline void reread_labels(Store* s, int32_t stale) noexcept nogil:
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
            touch(s, node)

cdef void remove_sequence(Store* s, int32_t sequence) noexcept nogil:
    cdef Sequence* q = sequence_at(s, sequence)
    cdef int32_t stale = ROOT, page = q.first_page, following, i, size
    forget_gaps(s, sequence)
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
