# The suffix automaton as C structs, and its states.
#
# Text positions are 1-based; position 0 stands for the empty prefix. A state is named by an int32.
# State s >= 0 holds the whole prefix of s tokens: its length, its earliest end and the target of
# its first transition (s, s and s + 1) need no storage. State s < 0 is clone ~s. State 0 is the
# root.
from common.heap cimport Entry
from common.types cimport int32_t, int64_t, state_t, token_t
from suffix_automaton.transition_table cimport NO_TOKEN, Slot, Table, find

cdef enum:
    ROOT = 0
    SEPARATOR = -1  # equal to no token, so nothing matches or drafts across it
    FIRST_CAPACITY = 16
    MAX_POSITIONS = 2147483646
    MISSING = -2147483648


cdef struct Position:
    token_t token      # the token at this position, SEPARATOR after a document
    state_t link       # suffix link of the prefix that ends here
    token_t branch     # newest token of its further transitions, NO_TOKEN without any
    int32_t latest     # a late end position of the prefix, see `latest_end`


cdef struct Clone:
    int32_t length     # of the longest string of the state
    state_t link
    int32_t earliest   # end of the first occurrence
    state_t target     # where the token after the first occurrence leads
    token_t branch
    int32_t latest


cdef struct Automaton:
    Position* positions
    Clone* clones
    int64_t n                   # tokens and separators
    int64_t position_capacity   # positions 0 .. n + 1 are in use, the last as a sentinel
    int64_t clone_count
    int64_t clone_capacity
    Table root                  # transitions of the root
    Table branches              # transitions of other states beyond their first
    int32_t refresh
    int32_t* position_counts    # occurrences, once frozen
    int32_t* clone_counts
    int64_t operations


cdef struct Match:
    state_t state
    int32_t length


cdef struct Branch:
    token_t token
    int32_t count


cdef struct Candidate:          # a string that a draft may go on to
    double prob
    state_t state
    token_t token
    int32_t parent              # node of the draft, -1: the match
    float rate


cdef struct Frontier:           # of a draft that branches
    Candidate* candidates       # all that were offered
    Entry* heap                 # those of them that wait
    int32_t offered
    int32_t waiting
    int64_t max_children
    double min_prob


cdef inline int32_t length_of(const Automaton* a, state_t s) noexcept nogil:
    return s if s >= 0 else a.clones[~s].length


cdef inline state_t link_of(const Automaton* a, state_t s) noexcept nogil:
    return a.positions[s].link if s >= 0 else a.clones[~s].link


cdef inline int32_t earliest_end(const Automaton* a, state_t s) noexcept nogil:
    return s if s >= 0 else a.clones[~s].earliest


cdef inline int32_t latest_end(const Automaton* a, state_t s) noexcept nogil:
    return a.positions[s].latest if s >= 0 else a.clones[~s].latest


cdef inline int32_t* latest_cell(Automaton* a, state_t s) noexcept nogil:
    return &a.positions[s].latest if s >= 0 else &a.clones[~s].latest


cdef inline token_t* branch_cell(const Automaton* a, state_t s) noexcept nogil:
    return &a.positions[s].branch if s >= 0 else &a.clones[~s].branch


cdef inline state_t* link_cell(Automaton* a, state_t s) noexcept nogil:
    return &a.positions[s].link if s >= 0 else &a.clones[~s].link


cdef inline token_t first_token(const Automaton* a, state_t s) noexcept nogil:
    """The token after the earliest occurrence; SEPARATOR where the text or a document ends."""
    return a.positions[earliest_end(a, s) + 1].token


cdef inline state_t first_target(const Automaton* a, state_t s) noexcept nogil:
    return s + 1 if s >= 0 else a.clones[~s].target


cdef inline int32_t count_of(const Automaton* a, state_t s) noexcept nogil:
    return a.position_counts[s] if s >= 0 else a.clone_counts[~s]


cdef inline state_t step(const Automaton* a, state_t s, token_t token) noexcept nogil:
    """Where `token` leads from `s`, or MISSING."""
    cdef const Table* table = &a.branches
    cdef Slot* slot
    if s == ROOT:
        table = &a.root
    elif first_token(a, s) == token:
        return first_target(a, s)
    elif branch_cell(a, s)[0] == NO_TOKEN:
        return MISSING
    slot = find(table, s, token)
    return MISSING if slot.token == NO_TOKEN else slot.target
