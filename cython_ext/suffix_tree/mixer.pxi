# Drafting from several suffix trees, as Python sees it.


cdef class Text:
    """A text that a `Mixer` drafts for: its tree, its end, where it copies from, how predictable it is.

    Args:
        tree: of the text; None for one that is not drafted from itself.
        sequence: of the tree, which the text is.
        context: int32 [n], its last tokens.
        vocab_size: bound of the ids that may be drafted for it.
    """

    cdef readonly SuffixTree tree
    cdef readonly int32_t sequence
    cdef MixedText state

    def __cinit__(self, SuffixTree tree, sequence, const token_t[::1] context, token_t vocab_size):
        cdef MixedText* t = &self.state
        cdef Py_ssize_t i
        self.tree = tree
        self.sequence = NIL if tree is None else tree._checked(sequence)
        t.sources.vocab_size = vocab_size
        t.sources.stores[0], t.sequences[0] = NULL, self.sequence
        if tree is not None:
            t.sources.stores[0] = &tree.store
        t.sequences[2] = NIL
        t.copy.next = t.copy.left = NIL
        t.trend = Trend(TREND_TRIALS, TREND_TRIALS, TREND_TRIALS, TREND_TRIALS)
        for i in range(max(context.shape[0] - LONGEST, 0), context.shape[0]):
            self.follow(context[i])

    cdef inline void follow(self, token_t token) noexcept:
        cdef MixedText* t = &self.state
        if t.count == LONGEST:
            memmove(&t.last[0], &t.last[1], (LONGEST - 1) * sizeof(token_t))
            t.count -= 1
        t.last[t.count] = token
        t.count += 1

    cdef MixedText* beside(self, SuffixTree memory, running, SuffixTree corpus) except NULL:
        """The text with what it is drafted from besides itself."""
        cdef MixedText* t = &self.state
        cdef int32_t i
        t.sources.stores[1], t.sequences[1], t.sources.stores[2] = NULL, NIL, NULL
        if memory is not None:
            t.sources.stores[1] = &memory.store
            if running is not None:
                t.sequences[1] = memory._checked(running)
        if corpus is not None:
            t.sources.stores[2] = &corpus.store
        for i in range(3):
            t.copy.last[i] = t.last[t.count - 1 - i] if i < t.count else -1
        return t


def extend_texts(list texts, const token_t[::1] token_ids, const int64_t[::1] offsets):
    """Append to each `Text`, which has a tree, its tokens, one text's behind another's in int32 [n], not negative.

    offsets: int64 [texts + 1], where each text's tokens begin.
    """
    cdef Text text
    cdef Py_ssize_t row, i
    check_offsets(offsets, len(texts), token_ids.shape[0])
    check_ids(token_ids)
    for row in range(len(texts)):
        text = texts[row]
        if text.tree is None:
            raise ValueError("texts: expected ones that have a tree")
        text.tree._extend(text.tree._checked(text.sequence), token_ids, offsets[row], offsets[row + 1])
        for i in range(offsets[row], offsets[row + 1]):
            text.follow(token_ids[i])


cdef class Mixer:
    """Drafts what follows texts from several suffix trees, and learns how much each context is worth.

    Args:
        cells: float32 [*CELL_SHAPE, 2], probability that a candidate with this evidence is right, and
            the number of trials that this rests on.
        copy_cells: float32 [*COPY_SHAPE, 2], the same for what the text's copy names.
        weights: float32 WEIGHT_SHAPE.
        rate: step of the gradient descent.

    All are copied. Not safe for concurrent use, nor are the trees while it works: it lets other threads run.
    """

    cdef readonly object cells, copy_cells, weights
    cdef list blocks
    cdef Mixture mixture
    cdef MixedDraft room
    cdef MixedText** texts
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
        self.blocks = []
        cdef float[:, ::1] cell_view = state
        cdef float[:, ::1] weight_view = self.weights
        cdef Mixture* m = &self.mixture
        cdef int32_t i
        m.cells, m.weights, m.rate = <Cell*>&cell_view[0, 0], &weight_view[0, 0], rate
        m.logits = <float*>owned(self.blocks, CELLS * sizeof(float))
        m.known = <KnownNames*>owned(self.blocks, KNOWN * sizeof(KnownNames))
        for i in range(CELLS):
            m.logits[i] = log_odds(cell_view[i, 0])

    def __dealloc__(self):
        free(self.room.contexts)
        free(self.room.copies)
        free(self.room.guesses)
        free(self.texts)

    cdef int _reserve(self, int32_t nodes) except -1:
        """Room for drafts of so many nodes."""
        cdef size_t places = <size_t>nodes + 1
        cdef MixedDraft* d = &self.room
        if nodes >= self.capacity:
            d.contexts = <Contexts*>resized(d.contexts, places * SOURCES * sizeof(Contexts))
            d.copies = <Copy*>resized(d.copies, places * sizeof(Copy))
            d.guesses = <Guess*>resized(d.guesses, places * sizeof(Guess))
            self.capacity = nodes + 1
        return 0

    cdef int _gather(self, list texts, list memories, list running, SuffixTree corpus) except -1:
        """Fill `texts` with what each is drafted from; see `draft`."""
        cdef Py_ssize_t count = len(texts), row
        cdef Text text
        if not len(memories) == len(running) == count:
            raise ValueError(
                f"memories and running: expected {count} of each, got {len(memories)} and "
                f"{len(running)}"
            )
        self.texts = <MixedText**>resized(self.texts, count * sizeof(MixedText*))
        for row in range(count):
            text = texts[row]
            self.texts[row] = text.beside(memories[row], running[row], corpus)
        return 0

    def draft(
        self, list texts, list memories, list running, SuffixTree corpus, list budgets, *,
        float min_prob=0,
    ):
        """Draft what may follow each of several texts, best first.

        Args:
            texts: `Text` each.
            memories: for each text the tree of a memory, or None.
            running: for each text the sequence of its memory's tree that ends as the text does, or
                None where there is no such.
            corpus: a tree for all of them; None: none.
            budgets: number of nodes of each at most.
            min_prob: no node is less probable.

        Returns int32 token ids, int32 parents, float32 probs, int32 classes, each [nodes] of one text's
        tree behind another's, and int64 [texts + 1], where each begins; parents count from there. The
        class is −1 less the number of the tree (text, memory, corpus) whose longest context named the
        token.
        """
        cdef Py_ssize_t count = len(texts), row, end = 0
        cdef MixedDraft* d = &self.room
        cdef int32_t i
        if len(budgets) != count:
            raise ValueError(f"budgets: expected {count} of them, got {len(budgets)}")
        budgets = [max(budget, 0) for budget in budgets]
        most = sum(budgets)
        self._reserve(max(budgets, default=0))
        tokens, parents = np.empty(most, np.int32), np.empty(most, np.int32)
        probs, classes = np.empty(most, np.float32), np.empty(most, np.int32)
        offsets = np.zeros(count + 1, np.int64)
        cdef token_t[::1] token_view = tokens
        cdef int32_t[::1] parent_view = parents, class_view = classes
        cdef float[::1] prob_view = probs
        cdef int64_t[::1] offset_view = offsets
        d.min_prob = min_prob
        self._gather(texts, memories, running, corpus)
        for row in range(count):
            self.texts[row].nodes = budgets[row]
        with nogil:
            for row in range(count):
                draft_text(self.texts[row], d, &self.mixture)
                for i in range(d.size):
                    token_view[end], parent_view[end] = d.guesses[i].token, d.guesses[i].parent
                    prob_view[end], class_view[end] = d.guesses[i].prob, -1 - d.guesses[i].source
                    end += 1
                offset_view[row + 1] = end
        return tokens[:end], parents[:end], probs[:end], classes[:end], offsets

    def learn(
        self, list texts, list memories, list running, SuffixTree corpus,
        const token_t[::1] token_ids, const int64_t[::1] offsets,
    ):
        """Learn from the tokens that follow each of several texts, before the trees take them in.

        Arguments as for `draft`; the tokens, int32 [n], are one text's behind another's, and `offsets`,
        int64 [texts + 1], tells where each text's begin.
        """
        cdef Py_ssize_t row
        check_offsets(offsets, len(texts), token_ids.shape[0])
        self._gather(texts, memories, running, corpus)
        with nogil:
            for row in range(offsets.shape[0] - 1):
                learn_tokens(&self.mixture, self.texts[row], token_ids[offsets[row]:offsets[row + 1]])
