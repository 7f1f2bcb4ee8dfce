# Storage of the suffix tree: pools of nodes, groups and pages of text, the child table, and what hangs
# below a node.
#
# Everything is named by an int32 index into a pool, so that growing a pool moves memory and no name.
# Text lies in pages; a *position* (page and offset in it) names a token and the suffix that starts
# there. An *item* is what a node has below it: the index of an inner node, or ~position of a leaf,
# a suffix that shares no further token with another and grows with its sequence at no cost.

cdef enum:
    ROOT = 0
    NIL = -1
    NO_ITEM = -2147483648  # no ~position and no node
    PAGE_BITS = 5
    PAGE_TOKENS = 1 << PAGE_BITS
    GAP_NAMES = 4

cdef struct Pool:  # items of equal size; the first int32 of a free item links to the next free one
    char* data
    size_t item_bytes
    int32_t capacity, used, first_free, free_count

cdef struct Node:
    int32_t parent
    int32_t count        # suffixes at or below
    int32_t end          # position of the label's last token, where it went on last if it ever did
    int32_t depth        # length of the label, from the root
    int32_t ends         # suffixes that stop exactly here
    int32_t children     # inner nodes and leaves
    int32_t first_child  # inner nodes, by descending count
    int32_t first_leaf
    int32_t first_end
    int32_t next, prev   # siblings; the first one's prev is the last one
    int32_t group        # the siblings of equal count; NIL: there are none
    int32_t stale        # the next node whose label must be read elsewhere; NIL: its own need not
    uint32_t stamp       # changes whenever what follows the node does

cdef struct Group:
    int32_t first, last

cdef struct Link:  # the suffix's that starts at a position
    int32_t node  # the parent of a leaf, or ~node where the suffix stops
    int32_t next, prev

cdef struct Page:
    int32_t next, prev
    int32_t owner  # sequence
    int32_t index  # the sequence's
    token_t tokens[PAGE_TOKENS]
    Link links[PAGE_TOKENS]

cdef struct Sequence:
    int32_t length  # NIL in a free slot
    int32_t first_page, last_page
    int32_t pending  # suffixes from this start on stop at a node and move when a token comes

cdef struct Slot:
    uint32_t tag
    int32_t item  # NO_ITEM in an empty slot

cdef struct Gap:  # how texts went on two tokens after a pair
    uint32_t tag             # 0: an empty entry
    uint16_t total
    uint16_t latest          # index of the token that came last; GAP_NAMES: it is not among them
    token_t tokens[GAP_NAMES]  # descending by count
    uint16_t counts[GAP_NAMES]

cdef struct Store:
    Pool nodes, groups, pages, sequences
    Slot* slots
    int64_t slot_count, slots_used
    Gap* gaps
    int32_t gap_count, gaps_used
    int64_t max_bytes  # 0: no limit
    int32_t max_depth
    int32_t serial  # this store's among all, from 1
    uint32_t clock  # the next stamp

cdef struct Place:  # a point of the trie: `depth` tokens down the label of an item; the root is ROOT, 0
    int32_t item, depth


# Pools

cdef inline int64_t pool_bytes(Pool* pool) noexcept nogil:
    return <int64_t>pool.capacity * <int64_t>pool.item_bytes

cdef inline int64_t store_bytes(Store* s) noexcept nogil:
    return (pool_bytes(&s.nodes) + pool_bytes(&s.groups) + pool_bytes(&s.pages)
            + pool_bytes(&s.sequences) + s.slot_count * <int64_t>sizeof(Slot)
            + s.gap_count * <int64_t>sizeof(Gap))

cdef inline int32_t pool_size(Pool* pool) noexcept nogil:
    return pool.used - pool.free_count

cdef inline bint fits(Store* s, int64_t more) noexcept nogil:
    return s.max_bytes == 0 or store_bytes(s) + more <= s.max_bytes

cdef inline Node* node_at(Store* s, int32_t index) noexcept nogil:
    return (<Node*>s.nodes.data) + index

cdef inline Group* group_at(Store* s, int32_t index) noexcept nogil:
    return (<Group*>s.groups.data) + index

cdef inline Page* page_at(Store* s, int32_t index) noexcept nogil:
    return (<Page*>s.pages.data) + index

cdef inline Sequence* sequence_at(Store* s, int32_t index) noexcept nogil:
    return (<Sequence*>s.sequences.data) + index

cdef inline void touch(Store* s, int32_t node) noexcept nogil:
    """What follows a node has changed, or its index is a new node's."""
    node_at(s, node).stamp = s.clock
    s.clock += 1

cdef inline Pool empty_pool(size_t item_bytes) noexcept nogil:
    return Pool(NULL, item_bytes, 0, 0, NIL, 0)

cdef bint pool_reserve(Store* s, Pool* pool, int32_t need, int64_t limit) except -1 nogil:
    """Make room for `need` more items; False: the byte limit is in the way."""
    cdef int64_t more = max(<int64_t>pool.capacity // 4, <int64_t>need)
    if pool.capacity - pool_size(pool) >= need:
        return True
    if not fits(s, more * <int64_t>pool.item_bytes):
        return False
    if pool.capacity + more > limit:
        with gil:
            raise MemoryError(f"a suffix tree is limited to {limit} items of a kind")
    pool.data = <char*>resized(pool.data, (pool.capacity + more) * pool.item_bytes)
    pool.capacity += <int32_t>more
    return True

cdef inline int32_t pool_take(Pool* pool) noexcept nogil:
    cdef int32_t index = pool.first_free
    if index == NIL:
        index = pool.used
        pool.used += 1
    else:
        pool.first_free = (<int32_t*>(pool.data + <size_t>index * pool.item_bytes))[0]
        pool.free_count -= 1
    return index

cdef inline void pool_release(Pool* pool, int32_t index) noexcept nogil:
    (<int32_t*>(pool.data + <size_t>index * pool.item_bytes))[0] = pool.first_free
    pool.first_free = index
    pool.free_count += 1


# Text

cdef inline Page* page_of(Store* s, int32_t position) noexcept nogil:
    return page_at(s, position >> PAGE_BITS)

cdef inline Link* link_at(Store* s, int32_t position) noexcept nogil:
    return &page_of(s, position).links[position & (PAGE_TOKENS - 1)]

cdef inline token_t token_at(Store* s, int32_t position) noexcept nogil:
    return page_of(s, position).tokens[position & (PAGE_TOKENS - 1)]

cdef inline int32_t start_of(Store* s, int32_t position) noexcept nogil:
    """Index in its sequence."""
    return page_of(s, position).index * PAGE_TOKENS + (position & (PAGE_TOKENS - 1))

cdef inline int32_t forward(Store* s, int32_t position, int32_t steps) noexcept nogil:
    cdef int32_t page = position >> PAGE_BITS
    cdef int32_t offset = (position & (PAGE_TOKENS - 1)) + steps
    while offset >= PAGE_TOKENS:
        page = page_at(s, page).next
        offset -= PAGE_TOKENS
    return (page << PAGE_BITS) + offset

cdef inline int32_t backward(Store* s, int32_t position, int32_t steps) noexcept nogil:
    cdef int32_t page = position >> PAGE_BITS
    cdef int32_t offset = (position & (PAGE_TOKENS - 1)) - steps
    while offset < 0:
        page = page_at(s, page).prev
        offset += PAGE_TOKENS
    return (page << PAGE_BITS) + offset

# Position of the last token of the first `depth` tokens of an item's label.
cdef inline int32_t label_end(Store* s, int32_t item, int32_t depth) noexcept nogil:
    if item >= 0:
        return backward(s, node_at(s, item).end, node_at(s, item).depth - depth)
    return forward(s, ~item, depth - 1)

cdef inline token_t label_token(Store* s, int32_t item, int32_t depth) noexcept nogil:
    return token_at(s, label_end(s, item, depth))

cdef inline int32_t item_depth(Store* s, int32_t item) noexcept nogil:
    cdef int32_t length
    if item >= 0:
        return node_at(s, item).depth
    length = sequence_at(s, page_of(s, ~item).owner).length - start_of(s, ~item)
    return min(length, s.max_depth)

cdef inline int32_t item_count(Store* s, int32_t item) noexcept nogil:
    return node_at(s, item).count if item >= 0 else 1

cdef inline int32_t item_parent(Store* s, int32_t item) noexcept nogil:
    return node_at(s, item).parent if item >= 0 else link_at(s, ~item).node


# Child table: (node, first token) to item, open addressing. A node with one child, the root apart,
# is not in it: its child hangs in its list alone, and may be given another first token freely.


# Murmur3's finaliser, a bijection: children of one node have different tags, so that an entry of
# equal tag and parent is the one looked for.
@cython.overflowcheck(False)
cdef inline uint32_t scramble(uint32_t h) noexcept nogil:
    h = (h ^ (h >> 16)) * <uint32_t>0x85EBCA6B
    h = (h ^ (h >> 13)) * <uint32_t>0xC2B2AE35
    return h ^ (h >> 16)

@cython.overflowcheck(False)
cdef inline uint32_t tag_of(int32_t parent, token_t token) noexcept nogil:
    return scramble(<uint32_t>token + scramble(<uint32_t>parent))

cdef inline int64_t home_of(Store* s, uint32_t tag) noexcept nogil:
    return <int64_t>((<uint64_t>tag * <uint64_t>s.slot_count) >> 32)

cdef inline int64_t after(Store* s, int64_t slot) noexcept nogil:
    slot += 1
    return 0 if slot == s.slot_count else slot

cdef inline void slot_fill(Store* s, uint32_t tag, int32_t item) noexcept nogil:
    cdef int64_t i = home_of(s, tag)
    while s.slots[i].item != NO_ITEM:
        i = after(s, i)
    s.slots[i].tag = tag
    s.slots[i].item = item

cdef bint table_reserve(Store* s, int64_t need) except -1 nogil:
    """Make room for `need` more entries below three quarters full; False: the byte limit is in the way."""
    cdef int64_t old_count = s.slot_count, new_count, i
    cdef Slot* old = s.slots
    if (s.slots_used + need) * 4 <= old_count * 3:
        return True
    new_count = old_count + old_count // 4
    if (s.slots_used + need) * 4 > new_count * 3:
        new_count = (s.slots_used + need) * 4 // 3 + 1
    # The old and the new table stand side by side while entries move.
    if not fits(s, new_count * <int64_t>sizeof(Slot)):
        return False
    s.slots = <Slot*>resized(NULL, new_count * sizeof(Slot))
    s.slot_count = new_count
    for i in range(new_count):
        s.slots[i].item = NO_ITEM
    for i in range(old_count):
        if old[i].item != NO_ITEM:
            slot_fill(s, old[i].tag, old[i].item)
    free(old)
    return True

cdef inline void table_add(Store* s, int32_t parent, token_t token, int32_t item) noexcept nogil:
    slot_fill(s, tag_of(parent, token), item)
    s.slots_used += 1

cdef inline int32_t table_find(Store* s, int32_t parent, token_t token) noexcept nogil:
    cdef uint32_t tag = tag_of(parent, token)
    cdef int64_t i = home_of(s, tag)
    cdef int32_t item
    while True:
        item = s.slots[i].item
        if item == NO_ITEM:
            return NO_ITEM
        if s.slots[i].tag == tag and item_parent(s, item) == parent:
            return item
        i = after(s, i)

cdef inline int64_t slot_of(Store* s, uint32_t tag, int32_t item) noexcept nogil:
    cdef int64_t i = home_of(s, tag)
    while s.slots[i].item != item:
        i = after(s, i)
    return i

cdef inline void table_replace(Store* s, int32_t parent, int32_t item, int32_t by) noexcept nogil:
    """Give the entry of an item, if it has one, to another that begins with the same token."""
    cdef token_t token
    if branches(s, parent):
        token = label_token(s, item, node_at(s, parent).depth + 1)
        s.slots[slot_of(s, tag_of(parent, token), item)].item = by

# Entries behind the gap move up where their probe would meet it, so that no gravestones are needed.
cdef inline void table_remove(Store* s, int32_t parent, token_t token, int32_t item) noexcept nogil:
    cdef int64_t gap = slot_of(s, tag_of(parent, token), item), i = gap, home
    while True:
        i = after(s, i)
        if s.slots[i].item == NO_ITEM:
            break
        home = home_of(s, s.slots[i].tag)
        if (home <= gap < i) or (i < home <= gap) or (gap < i < home):
            s.slots[gap] = s.slots[i]
            gap = i
    s.slots[gap].item = NO_ITEM
    s.slots_used -= 1


# Lists of positions: a node's leaves and its ends

cdef inline void push(Store* s, int32_t* head, int32_t position) noexcept nogil:
    cdef Link* link = link_at(s, position)
    link.prev = NIL
    link.next = head[0]
    if head[0] != NIL:
        link_at(s, head[0]).prev = position
    head[0] = position

cdef inline void drop(Store* s, int32_t* head, int32_t position) noexcept nogil:
    cdef Link* link = link_at(s, position)
    if link.prev == NIL:
        head[0] = link.next
    else:
        link_at(s, link.prev).next = link.next
    if link.next != NIL:
        link_at(s, link.next).prev = link.prev


# Siblings: inner nodes by descending count. Several of equal count form a group that knows its ends,
# so that a count may change by one in O(1).

cdef inline void insert_after(Store* s, int32_t child, int32_t place) noexcept nogil:
    cdef Node* c = node_at(s, child)
    c.prev = place
    c.next = node_at(s, place).next
    node_at(s, place).next = child
    if c.next != NIL:
        node_at(s, c.next).prev = child
    else:
        node_at(s, node_at(s, c.parent).first_child).prev = child

cdef inline void insert_before(Store* s, int32_t child, int32_t place) noexcept nogil:
    cdef Node* c = node_at(s, child)
    c.next = place
    c.prev = node_at(s, place).prev
    if node_at(s, c.parent).first_child == place:
        node_at(s, c.parent).first_child = child
    else:
        node_at(s, c.prev).next = child
    node_at(s, place).prev = child

cdef inline void unlink(Store* s, int32_t child) noexcept nogil:
    cdef Node* c = node_at(s, child)
    cdef Node* parent = node_at(s, c.parent)
    if parent.first_child == child:
        parent.first_child = c.next
    else:
        node_at(s, c.prev).next = c.next
    if c.next != NIL:
        node_at(s, c.next).prev = c.prev
    elif parent.first_child != NIL:
        node_at(s, parent.first_child).prev = c.prev

cdef void leave_group(Store* s, int32_t child) noexcept nogil:
    cdef Node* c = node_at(s, child)
    cdef Group* group
    if c.group == NIL:
        return
    group = group_at(s, c.group)
    if group.first == child:
        group.first = c.next
    elif group.last == child:
        group.last = c.prev
    if group.first == group.last:
        node_at(s, group.first).group = NIL
        pool_release(&s.groups, c.group)
    c.group = NIL

cdef void join_group(Store* s, int32_t elder, int32_t younger) noexcept nogil:
    """Let two neighbours, one of them without a group, be in one if their counts are equal."""
    cdef Node* e = node_at(s, elder)
    cdef Node* y = node_at(s, younger)
    cdef int32_t group = e.group if e.group != NIL else y.group
    if e.count != y.count:
        return
    if group == NIL:
        group = pool_take(&s.groups)
        group_at(s, group)[0] = Group(elder, younger)
    elif e.group == NIL:
        group_at(s, group).first = elder
    else:
        group_at(s, group).last = younger
    e.group = y.group = group

cdef inline void join_elder(Store* s, int32_t child) noexcept nogil:
    cdef Node* c = node_at(s, child)
    if node_at(s, c.parent).first_child != child:
        join_group(s, c.prev, child)

cdef inline void join_younger(Store* s, int32_t child) noexcept nogil:
    cdef int32_t younger = node_at(s, child).next
    if younger != NIL:
        join_group(s, child, younger)

cdef inline void raise_count(Store* s, int32_t child) noexcept nogil:
    cdef Node* c = node_at(s, child)
    cdef int32_t first = child if c.group == NIL else group_at(s, c.group).first
    leave_group(s, child)
    if first != child:
        unlink(s, child)
        insert_before(s, child, first)
    c.count += 1
    join_elder(s, child)

cdef inline void lower_count(Store* s, int32_t child) noexcept nogil:
    cdef Node* c = node_at(s, child)
    cdef int32_t last = child if c.group == NIL else group_at(s, c.group).last
    leave_group(s, child)
    if last != child:
        unlink(s, child)
        insert_after(s, child, last)
    c.count -= 1
    join_younger(s, child)

cdef inline void append_child(Store* s, int32_t parent, int32_t child) noexcept nogil:
    """Append it below all its siblings: its count must not be above theirs."""
    cdef Node* c = node_at(s, child)
    c.parent = parent
    c.group = NIL
    if node_at(s, parent).first_child == NIL:
        node_at(s, parent).first_child = c.prev = child
        c.next = NIL
    else:
        insert_after(s, child, node_at(s, node_at(s, parent).first_child).prev)
    join_elder(s, child)


# Children

cdef inline bint branches(Store* s, int32_t node) noexcept nogil:
    """Whether the node's children stand in the table."""
    return node_at(s, node).children > 1 or node == ROOT

cdef inline int32_t first_item(Store* s, int32_t node) noexcept nogil:
    """The child of the highest count, or NO_ITEM."""
    cdef Node* v = node_at(s, node)
    if v.first_child != NIL:
        return v.first_child
    return ~v.first_leaf if v.first_leaf != NIL else NO_ITEM

cdef inline int32_t next_item(Store* s, int32_t item) noexcept nogil:
    """The sibling that follows by descending count, or NO_ITEM."""
    cdef int32_t leaf
    if item >= 0:
        if node_at(s, item).next != NIL:
            return node_at(s, item).next
        leaf = node_at(s, node_at(s, item).parent).first_leaf
    else:
        leaf = link_at(s, ~item).next
    return ~leaf if leaf != NIL else NO_ITEM

cdef inline int32_t child_of(Store* s, int32_t node, token_t token) noexcept nogil:
    cdef int32_t item
    if branches(s, node):
        return table_find(s, node, token)
    item = first_item(s, node)
    if item != NO_ITEM and label_token(s, item, node_at(s, node).depth + 1) == token:
        return item
    return NO_ITEM

cdef inline void add_leaf(Store* s, int32_t node, token_t token, int32_t position) noexcept nogil:
    cdef int32_t only = NO_ITEM, depth = node_at(s, node).depth + 1
    if not branches(s, node):
        only = first_item(s, node)
    link_at(s, position).node = node
    push(s, &node_at(s, node).first_leaf, position)
    node_at(s, node).children += 1
    if only != NO_ITEM:
        table_add(s, node, label_token(s, only, depth), only)
    if branches(s, node):
        table_add(s, node, token, ~position)

cdef inline void remove_leaf(Store* s, int32_t node, int32_t position) noexcept nogil:
    cdef int32_t only, depth = node_at(s, node).depth + 1
    cdef bint branched = branches(s, node)
    if branched:
        table_remove(s, node, label_token(s, ~position, depth), ~position)
    drop(s, &node_at(s, node).first_leaf, position)
    node_at(s, node).children -= 1
    if branched and not branches(s, node):
        only = first_item(s, node)
        table_remove(s, node, label_token(s, only, depth), only)
