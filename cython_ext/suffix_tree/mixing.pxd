# What mixing keeps: the state it learns, and the contexts and candidates of one place in a text.
from suffix_tree.store cimport Place, Store
from common.heap cimport Entry
from common.types cimport int32_t, token_t

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
    int32_t counts[NAMES]
    int32_t size, support, latest  # latest: index of the token that came last, −1 for none
    bint alone                     # whether there is but one continuation

cdef struct Reading:  # of one context
    Store* store
    Place place
    int32_t source, shortest, longest
    int32_t item    # the next continuation
    int32_t latest  # position that the latest continuation follows
    bint inside     # an edge: there is but one continuation
    Names names

cdef struct Expansion:  # the candidates for one place, and what speaks for each
    token_t tokens[CANDIDATES]
    int32_t sources[CANDIDATES]              # whose longest context named it first
    float probs[CANDIDATES]
    float inputs[INPUTS][CANDIDATES]
    int32_t rows[WITNESSES]                  # first cell of the witness; −1: it is absent
    int32_t heard[WITNESSES]                 # which of `offsets` the witness reads
    int32_t offsets[WITNESSES][CANDIDATES]   # by what is heard, in all sources
    int32_t others[WITNESSES]                # offset of a candidate that the context does not name
    int32_t size, memory_group, text_group

cdef struct Mixture:
    Cell* cells
    float* logits     # of the cells
    float* weights    # [GROUPS, INPUTS]: common, by longest order of memory, by text's and copy
    float rate

cdef struct Sources:
    Store* stores[SOURCES]  # NULL where there is none
    token_t vocab_size      # no id from here on is a candidate

cdef struct Guess:
    token_t token
    int32_t parent, source
    float prob

cdef struct MixedDraft:
    int32_t budget
    float min_prob
    bint path            # without branches
    Contexts* contexts   # [budget + 1, SOURCES], of the root and the drafted nodes
    Copy* copies         # [budget + 1]
    Guess* guesses       # [(budget + 1) * CANDIDATES]
    Entry* heap          # of the guesses
    int32_t guessed, queued
    int32_t size
    token_t* tokens
    int32_t* parents
    int32_t* classes
    float* probs
