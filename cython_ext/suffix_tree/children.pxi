# What hangs below a node: inner nodes by descending count, leaves and ends.


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
    """Below all its siblings: its count must not be above theirs."""
    cdef Node* c = node_at(s, child)
    c.parent = parent
    c.group = NIL
    if node_at(s, parent).first_child == NIL:
        node_at(s, parent).first_child = c.prev = child
        c.next = NIL
    else:
        insert_after(s, child, node_at(s, node_at(s, parent).first_child).prev)
    join_elder(s, child)

cdef inline void remove_child(Store* s, int32_t child) noexcept nogil:
    leave_group(s, child)
    unlink(s, child)

cdef void take_place(Store* s, int32_t child, int32_t by) noexcept nogil:
    """Put `by`, of equal count, among the siblings where `child` is."""
    cdef Node* c = node_at(s, child)
    cdef Node* b = node_at(s, by)
    cdef Node* parent = node_at(s, c.parent)
    b.parent, b.next, b.prev, b.group = c.parent, c.next, c.prev, c.group
    if parent.first_child == child:
        parent.first_child = by
    else:
        node_at(s, c.prev).next = by
    if c.next != NIL:
        node_at(s, c.next).prev = by
    else:
        node_at(s, parent.first_child).prev = by
    if c.group != NIL and group_at(s, c.group).first == child:
        group_at(s, c.group).first = by
    elif c.group != NIL and group_at(s, c.group).last == child:
        group_at(s, c.group).last = by


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

cdef inline void add_end(Store* s, int32_t node, int32_t position) noexcept nogil:
    link_at(s, position).node = ~node
    node_at(s, node).ends += 1
    push(s, &node_at(s, node).first_end, position)

cdef inline void remove_end(Store* s, int32_t node, int32_t position) noexcept nogil:
    node_at(s, node).ends -= 1
    drop(s, &node_at(s, node).first_end, position)
