# What mixing keeps: the state it learns, and the contexts and candidates of one place in a text.
from suffix_tree.store cimport Place, Store
from common.types cimport int8_t, int32_t, token_t, uint8_t, uint32_t

cdef enum:
    SOURCES = 3        # the text, the memory, a corpus
    ORDERS = 10        # lengths of context
    KINDS = 11         # contexts of each source: of each length, and a pair before a gap
    CONTEXTS = 33      # SOURCES * KINDS
    COPIES = 2         # ways in which a copy may go on
    WITNESSES = 35     # CONTEXTS + COPIES
    BOTH = 35          # input of a candidate that the text and another source name
    BIAS = 36
    INPUTS = 37
    SUPPORTS = 7       # buckets
    SHARES = 10
    OFFSETS = 20       # SHARES * 2: whether the latest occurrence went on so
    COPY_KINDS = 32    # of each way in which a copy may go on
    COPY_CELL = 4620   # the first one of copies: CONTEXTS * SUPPORTS * OFFSETS
    CELLS = 4748       # COPY_CELL + COPIES * COPY_KINDS * 2
    COPY_STATES = 3    # as `copy_state` tells them
    GROUPS = 45        # of weights: 1 + (ORDERS + 1) + (ORDERS + 1) * COPY_STATES
    CANDIDATES = 24
    NAMES = 9          # continuations that a context names: the most frequent, and the latest
    TABLE = 64         # room for the candidates
    KNOWN = 16384      # nodes whose continuations are kept
    LONGEST = 24       # tokens of the longest context looked at

cdef struct Cell:  # how often candidates with this evidence were right
    float prob, trials

cdef struct Context:
    Place place    # of its shortest length: where lengths go on alike, one stands for all
    int32_t shortest, longest

cdef struct Contexts:  # of one source, the longest first
    Context at[ORDERS]
    int32_t count

cdef struct Copy:  # where a text copies from
    int32_t next      # position of the token that comes next; NIL: the two have parted
    int32_t length    # tokens copied in a row
    int32_t left      # position of the token that did not come when they parted; NIL: they never did
    int32_t since     # tokens since then
    int32_t breaks    # lately
    token_t last[3]   # of the text, the last one first; −1: there are fewer

cdef struct CopyNames:  # how it may go on
    token_t tokens[COPIES]  # −1: none
    int32_t kinds[COPIES]

cdef struct Trend:  # of a text: how often its likeliest candidates came, and how often they were due
    float hits, misses, due_hits, due_misses

cdef struct Names:  # how one context goes on
    token_t tokens[NAMES]
    uint8_t offsets[NAMES]  # of the cells that speak for each: 2 * bucket of its share + whether it came last
    uint8_t size
    uint8_t more            # whether there are others
    int32_t support

cdef struct KnownNames:  # of a node of the tree with this serial, while its stamp is this one
    int32_t store, node
    uint32_t stamp
    Names names

cdef struct Reading:  # of one context
    Store* store
    Place place
    int32_t source, shortest, longest
    int32_t item              # the next continuation
    int32_t read              # continuations so far,
    int32_t positions[NAMES]  # of their tokens
    int32_t counts[NAMES]
    Names names

cdef struct Named:  # a candidate, and the offset of the cell that speaks for it
    uint8_t candidate, offset

cdef struct Heard:  # what a context says
    Named names[CANDIDATES]
    int32_t size, source
    int32_t others  # offset of a candidate that it does not name

cdef struct Witness:
    int32_t input, row  # and its first cell
    int32_t heard

cdef struct Expansion:  # the candidates for one place, and what speaks for each
    token_t tokens[CANDIDATES]
    int32_t sources[CANDIDATES]   # whose longest context named it first
    int32_t named_by[CANDIDATES]  # bits of sources
    float probs[CANDIDATES]
    int8_t table[TABLE]           # candidates by token, −1: none
    Heard heard[WITNESSES]
    Witness witnesses[WITNESSES]
    int32_t size, heard_count, witness_count, memory_group, text_group

cdef struct Mixture:
    Cell* cells
    float* logits     # of the cells
    float* weights    # [GROUPS, INPUTS]: common, by longest order of memory, by text's and copy
    KnownNames* known # [KNOWN]
    float rate

cdef struct Sources:
    Store* stores[SOURCES]  # NULL where there is none
    token_t vocab_size      # no id from here on is a candidate

cdef struct MixedText:  # a text, and what it is drafted from
    Sources sources
    int32_t sequences[SOURCES]  # of each source, which end as the text does; NIL: there is none
    const token_t* last         # [count], its last tokens
    int32_t count
    int32_t nodes               # to draft at most
    Copy* copy
    Trend* trend

cdef struct Guess:
    token_t token
    int32_t parent, source
    float prob

cdef struct MixedDraft:
    int32_t budget
    float min_prob
    bint path            # without branches
    Contexts* contexts   # [budget + 1, SOURCES], of the root and the nodes
    Copy* copies         # [budget + 1]
    Guess* guesses       # [budget], the most probable first
    int32_t size         # of them are nodes,
    int32_t queued       # and so many follow
