# Storage of the suffix tree: pools of nodes, groups and pages of text, and the child table.
#
# Everything is named by an int32 index into a pool, so that growing a pool moves memory and no name.
# Text lies in pages; a *position* (page and offset in it) names a token and the suffix that starts
# there. An *item* is what a node has below it: the index of an inner node, or ~position of a leaf,
# a suffix that shares no further token with another and grows with its sequence at no cost.
from common.types cimport int32_t, int64_t, token_t, uint16_t, uint32_t

cdef enum:
    ROOT = 0
    NIL = -1
    NO_ITEM = -2147483648  # no ~position and no node
    PAGE_BITS = 5
    PAGE_TOKENS = 32
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

cdef struct Link:  # of the suffix that starts at a position
    int32_t node  # the parent of a leaf, or ~node where the suffix stops
    int32_t next, prev

cdef struct Page:
    int32_t next, prev
    int32_t owner  # sequence
    int32_t index  # in the sequence
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
    token_t tokens[GAP_NAMES]  # by descending count
    uint16_t counts[GAP_NAMES]

cdef struct Store:
    Pool nodes, groups, pages, sequences
    Slot* slots
    int64_t slot_count, slots_used
    Gap* gaps
    int32_t gap_count, gaps_used
    int64_t max_bytes  # 0: no limit
    int32_t max_depth
    int32_t serial  # of this store among all, from 1
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
    return length if length < s.max_depth else s.max_depth

cdef inline int32_t item_count(Store* s, int32_t item) noexcept nogil:
    return node_at(s, item).count if item >= 0 else 1

cdef inline int32_t item_parent(Store* s, int32_t item) noexcept nogil:
    return node_at(s, item).parent if item >= 0 else link_at(s, ~item).node
