# Drafting from several suffix trees, as Python sees it.


cdef class TextState:
    """What a `Mixer` keeps of one text: where it copies from, and how predictable it is."""

    cdef Copy copy
    cdef Trend trend

    def __cinit__(self):
        self.copy = Copy(
            next=NIL, length=0, left=NIL, since=0, breaks=0, last=[-1, -1, -1]
        )
        self.trend = Trend(TREND_TRIALS, TREND_TRIALS, TREND_TRIALS, TREND_TRIALS)

    cdef void look_back(self, const token_t[::1] context) noexcept:
        cdef Py_ssize_t i, n = context.shape[0]
        for i in range(3):
            self.copy.last[i] = context[n - 1 - i] if i < n else -1


cdef class Mixer:
    """Drafts what follows a text from several suffix trees, and learns how much each context is worth.

    Args:
        cells: float32 [*CELL_SHAPE, 2], probability that a candidate with this evidence is right, and
            the number of trials that this rests on.
        copy_cells: float32 [*COPY_SHAPE, 2], the same for what the text's copy names.
        weights: float32 WEIGHT_SHAPE.
        rate: step of the gradient descent.

    All are copied. Not safe for concurrent use without the interpreter's lock.
    """

    cdef readonly object cells, copy_cells, weights
    cdef object _logits
    cdef Mixture mixture
    cdef Expansion expansion
    cdef MixedDraft room
    cdef int32_t capacity

    def __cinit__(self, cells, copy_cells, weights, float rate=0.002):
        found = (cells.shape, copy_cells.shape, weights.shape)
        expected = ((*CELL_SHAPE, 2), (*COPY_SHAPE, 2), WEIGHT_SHAPE)
        if found != expected:
            raise ValueError(
                f"cells, copy_cells and weights: expected shapes {expected}, got {found}"
            )
        state = np.concatenate([cells.reshape(-1, 2), copy_cells.reshape(-1, 2)]).astype(np.float32)
        self.cells = state[:COPY_CELL].reshape(cells.shape)
        self.copy_cells = state[COPY_CELL:].reshape(copy_cells.shape)
        self.weights = np.array(weights, dtype=np.float32, order="C")
        self._logits = np.empty(CELLS, dtype=np.float32)
        cdef float[:, ::1] cell_view = state
        cdef float[:, ::1] weight_view = self.weights
        cdef float[::1] logit_view = self._logits
        cdef int32_t i
        self.mixture = Mixture(<Cell*>&cell_view[0, 0], &logit_view[0], &weight_view[0, 0], NULL, rate)
        self.mixture.known = <KnownNames*>grown(NULL, KNOWN * sizeof(KnownNames))
        memset(self.mixture.known, 0, KNOWN * sizeof(KnownNames))
        for i in range(CELLS):
            logit_view[i] = log_odds(cell_view[i, 0])
        self._reserve(1)

    def __dealloc__(self):
        free(self.room.contexts)
        free(self.room.copies)
        free(self.room.guesses)
        free(self.mixture.known)

    cdef int _reserve(self, int32_t nodes) except -1:
        """Room for drafts of so many nodes."""
        cdef size_t places = <size_t>nodes + 1
        if nodes <= self.capacity:
            return 0
        self.room.contexts = <Contexts*>grown(self.room.contexts, places * SOURCES * sizeof(Contexts))
        self.room.copies = <Copy*>grown(self.room.copies, places * sizeof(Copy))
        self.room.guesses = <Guess*>grown(self.room.guesses, places * sizeof(Guess))
        self.capacity = nodes
        return 0

    cdef int32_t _find(
        self, tuple trees, tuple sequences, const token_t[::1] context, token_t vocab_size,
        Sources* sources,
    ) except -1:
        """Fill the sources and the contexts of the root; returns the tokens of the longest one."""
        cdef int32_t source, matched, longest = 0
        cdef Place[ORDERS] matches
        cdef SuffixTree tree
        sources.vocab_size = vocab_size
        for source in range(SOURCES):
            sources.stores[source] = NULL
            self.room.contexts[source].count = 0
            if trees[source] is None:
                continue
            tree = trees[source]
            sources.stores[source] = &tree.store
            matched = tree._match(sequences[source], context, matches)
            find_contexts(&tree.store, matches, matched, &self.room.contexts[source])
            if self.room.contexts[source].count:
                longest = max(longest, self.room.contexts[source].at[0].longest)
        return longest

    def draft(
        self, tuple trees, tuple sequences, const token_t[::1] context, TextState state,
        int budget, *, token_t vocab_size, double alpha=INFINITY, float min_prob=0, bint path=False,
    ):
        """Draft what may follow `context`, best first.

        Args:
            trees: of the text, the memory and a corpus, each None where there is none.
            sequences: whose tokens end as `context` does, in each tree; None where there is no such.
            context: int32 [n], the last tokens of the text.
            state: of the text.
            budget: number of nodes at most.
            vocab_size: bound of the ids that may be drafted.
            alpha: nodes for each token of the longest context, at most.
            min_prob: no node is less probable.
            path: draft a single path.

        Returns int32 token ids, int32 parents, float32 probs, int32 classes, each [nodes]. The class is
        −1 less the number of the tree whose longest context named the token.
        """
        cdef int32_t nodes = max(budget, 0), longest, i
        cdef Sources sources
        cdef MixedDraft* d = &self.room
        self._reserve(nodes)
        longest = self._find(trees, sequences, context, vocab_size, &sources)
        tokens, parents = np.empty(nodes + 1, np.int32), np.empty(nodes + 1, np.int32)
        probs, classes = np.empty(nodes + 1, np.float32), np.empty(nodes + 1, np.int32)
        cdef token_t[::1] token_view = tokens
        cdef int32_t[::1] parent_view = parents, class_view = classes
        cdef float[::1] prob_view = probs
        d.min_prob, d.path = min_prob, path
        d.budget = <int32_t>min(<double>nodes, alpha * max(longest, 1))
        state.look_back(context)
        d.copies[0] = state.copy
        find_copy(&sources, d.contexts, d.copies)
        draft_mixed(d, &self.mixture, &sources, &state.trend, &self.expansion)
        for i in range(d.size):
            token_view[i], parent_view[i] = d.guesses[i].token, d.guesses[i].parent
            prob_view[i], class_view[i] = d.guesses[i].prob, -1 - d.guesses[i].source
        return tokens[:d.size], parents[:d.size], probs[:d.size], classes[:d.size]

    def learn(
        self, tuple trees, tuple sequences, const token_t[::1] context, TextState state,
        const token_t[::1] token_ids, *, token_t vocab_size,
    ):
        """Learn from the tokens that follow `context`, before the trees take them in.

        Arguments as for `draft`; token_ids: int32 [n].
        """
        cdef Sources sources
        self._find(trees, sequences, context, vocab_size, &sources)
        state.look_back(context)
        learn_tokens(
            &self.mixture, &sources, self.room.contexts, &state.copy, &state.trend, token_ids,
            &self.expansion,
        )


cdef void* grown(void* block, size_t size) except NULL:
    block = realloc(block, size)
    if block == NULL:
        raise MemoryError
    return block
