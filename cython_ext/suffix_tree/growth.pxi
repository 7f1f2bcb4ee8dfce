# How the suffix tree takes in a token and lets go of a sequence.

# Growing

cdef inline int reserve_for_token(Store* s) noexcept nogil:
    """1: room for one more token at worst, 0: the byte limit is in the way, -1: no memory."""
    cdef int32_t moves = s.max_depth + 1
    cdef int32_t groups = pool_size(&s.nodes) // 2 + moves  # two nodes at least in each, whatever is removed
    cdef int room = pool_reserve(s, &s.nodes, moves, 2147483647)
    if room > 0:
        room = pool_reserve(s, &s.groups, groups - pool_size(&s.groups), 2147483647)
    if room > 0:
        room = pool_reserve(s, &s.pages, 1, 2147483647 >> PAGE_BITS)
    if room > 0:
        room = table_reserve(s, 2 * moves)
    if room > 0:
        room = gaps_reserve(s)
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
    if branches(s, node):
        table_replace(s, node, token, item, middle)
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
    cdef int32_t parent = node_at(s, node).parent
    if branches(s, parent):
        table_replace(
            s, parent, label_token(s, node, node_at(s, parent).depth + 1), node, child
        )
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
        add_end(s, node, suffix)
    if item_depth(s, item) == depth:
        stop_leaf(s, node, ~item)
    return node

cdef inline void fetch_slot(Store* s, int32_t node, token_t token) noexcept nogil:
    prefetch(&s.slots[home_of(s, tag_of(node, token))])

cdef inline void fetch_children(Store* s, int32_t suffix, int32_t count, token_t token) noexcept nogil:
    """Ask for the items below `count` suffixes' nodes, so that their cache misses do not queue up."""
    cdef int32_t i, node, item
    for i in range(count):
        node = ~link_at(s, suffix).node
        item = s.slots[home_of(s, tag_of(node, token))].item if branches(s, node) else first_item(s, node)
        if item >= 0:
            prefetch(node_at(s, item))
        elif item != NO_ITEM:
            prefetch(page_of(s, ~item))
            prefetch(link_at(s, ~item))
        if i + 1 < count:
            suffix = forward(s, suffix, 1)

cdef void append_token(
    Store* s, int32_t sequence, token_t token, token_t following
) noexcept nogil:
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
            node = descend(s, node, suffix, token, item)
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
