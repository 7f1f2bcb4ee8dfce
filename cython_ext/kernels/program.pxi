# Operators one after another in one call, with what a forward's cache and masks have to tell them.

cdef struct _Buffer:
    # Where the keys or values of a layer lie: [batch, heads, slots, depth] from the first slot there is.
    char *data
    int64_t strides[3]
    int64_t batch, heads, depth


cdef struct _Run:
    # Tokens of a line of a forward, `count` from `begin` on, that are written to a row of the cache; the slots
    # from `first` on up to `end`, behind the last of them, are seen.
    int64_t line, begin, count, row, first, end


cdef struct _Pages:
    # Keys and values of a layer, [slots, heads * depth], and what a forward sees of them and writes to.
    char *keys
    char *values
    const int64_t *sources
    const int64_t *seen
    const int64_t *written
    int64_t read, tokens


cdef struct _Place:
    # What a forward writes to of a layer, from `start` on, and what it then sees of it; counted from the
    # first slot there is. `length` counts from the first that there ever was, as `base` does, which is the
    # first there is. `apart`: rows are written to where runs say; `pages`: where they lie, if this is a copy.
    _Buffer keys, values
    int64_t start, first, extent, length, base
    bint apart
    const _Run *runs
    int run_count
    _Pages pages


cdef class GivenLayers:
    """What each layer of a cache is given by a forward that adds one stretch of slots to each row, and shows.

    Args:
        numbers: of the layers that are written to.
        dtype: of their keys and values.
        paged: whether these lie in pages, see `Pages`.
    """

    cdef _Place *_places
    cdef list _numbers
    cdef object _dtype
    cdef object _masks
    cdef list _kept
    cdef object _read
    cdef int64_t *_slots  # row and slot of each token, where rows differ
    cdef _Run *_runs
    cdef int64_t _tokens, _room
    cdef int _run_count
    cdef bint _paged

    def __cinit__(self, numbers, dtype, paged):
        self._paged = paged
        self._numbers, self._dtype, self._kept, self._masks = list(numbers), dtype, [], ()
        self._places = <_Place *>calloc(max(self._numbers, default=0) + 1, sizeof(_Place))
        if self._places == NULL:
            raise MemoryError("no memory for the places of layers")

    def __dealloc__(self):
        free(self._places)
        free(self._slots)
        free(self._runs)

    cdef bint read(self, rows, slots) except -1:
        """Note where tokens are written to; whether that is one stretch of each row, these ascending.

        Args:
            rows, slots: int64 [lines, tokens]; rows broadcast.
        """
        cdef int64_t lines, width, line, i, place = 0, row, slot
        cdef int64_t row_steps[2]
        cdef int64_t slot_steps[2]
        cdef const int64_t *row_data
        cdef const int64_t *slot_data
        cdef _Run *run = NULL
        lines, width = slots.shape
        rows = rows.expand(lines, width)
        if lines * width > self._room:
            free(self._slots)
            free(self._runs)
            self._room, self._runs = 0, NULL
            self._slots = <int64_t *>calloc(2 * lines * width, sizeof(int64_t))
            self._runs = <_Run *>calloc(lines * width, sizeof(_Run))
            if self._slots == NULL or self._runs == NULL:
                raise MemoryError("no memory for the places of tokens")
            self._room = lines * width
        row_steps, slot_steps = rows.stride(), slots.stride()
        row_data, slot_data = <int64_t *><uintptr_t>rows.data_ptr(), <int64_t *><uintptr_t>slots.data_ptr()
        self._tokens, self._run_count = lines * width, 0
        for line in range(lines):
            for i in range(width):
                row = row_data[line * row_steps[0] + i * row_steps[1]]
                slot = slot_data[line * slot_steps[0] + i * slot_steps[1]]
                self._slots[place], self._slots[place + 1] = row, slot
                place += 2
                if run != NULL and i > 0 and run.row == row and run.end == slot:
                    run.count, run.end = run.count + 1, slot + 1
                    continue
                if row < 0 or slot < 0 or (run != NULL and row <= run.row):
                    return False
                run = self._runs + self._run_count
                run.line, run.begin, run.count, run.row, run.first, run.end = line, i, 1, row, 0, slot + 1
                self._run_count += 1
        return True

    cdef bint holds(self, const _Place *place) except -1:
        """Whether a layer has all slots that were read."""
        cdef const _Run *run
        cdef int i
        for i in range(self._run_count):
            run = self._runs + i
            if (
                run.row >= place.keys.batch or run.row >= place.values.batch or run.end > place.length
                or run.end - run.count < place.base or run.end - place.base <= place.first
            ):
                return False
        return True

    def open(self, layers, masks, int64_t tokens):
        """Make room for so many tokens more in all layers, and let them hold these; False, and none of them
        does, where each row is not written to one stretch of slots in blocks.

        Args:
            layers: of the cache.
            masks: of attention.
        """
        cdef _Place *place
        cdef _Place now
        cdef _Buffer *buffer
        cdef _Buffer like
        cdef int64_t room = 0, step = 0
        cdef uintptr_t data = 0
        now.start, now.first, now.length, now.apart = 0, 0, 0, False
        self._read = None
        held, viewed, kept = None, None, []
        if self._paged:
            self.open_pages(layers)
            self._tokens, self._masks = tokens, masks
            return True
        for number in self._numbers:
            layer = layers[number]
            store = layer.store
            view = layer.slots.views[layer.is_sliding]
            if view is None:
                now.start, now.first, now.length = store.length, -1, store.length + tokens
            elif view is not viewed:
                if view.extent is None:
                    return False
                now.apart, now.length = view.places is not None, view.extent
                if now.apart and view.places is not self._read:
                    rows, slots = view.places
                    if not self.read(rows, slots):
                        return False
                    self._read = view.places
                now.start = 0 if now.apart else view.start
                now.first = -1 if view.first is None else view.first
            viewed = view
            place = self._places + <int64_t>number
            place.start, place.first, place.length = now.start, now.first, now.length
            place.apart, place.runs, place.run_count = now.apart, self._runs, self._run_count
            refs = store.block_refs
            if not refs:
                return False
            buffer = &place.keys
            for block, which in refs:
                if block is not held or now.length > room:
                    if not block.make_room(now.length, self._dtype):
                        return False
                    held, room, base, states = block, now.length, block.base, block.states
                    kept.append(states)
                    _, like.batch, like.heads, _, like.depth = states.shape
                    step, like.strides[0], like.strides[1], like.strides[2], _ = states.stride()
                    step, data = step * states.element_size(), states.data_ptr()
                buffer[0] = like
                buffer.data = <char *>(data + <int64_t>which * step)
                buffer = &place.values
            place.base = base
            place.start, place.extent = place.start - place.base, place.length - place.base
            place.first = 0 if place.first < 0 else place.first - place.base
            if place.apart and not self.holds(place):
                return False
        for number in self._numbers:
            layers[number].store.length = self._places[<int64_t>number].length
        self._kept, self._masks = kept, masks
        return True

    cdef int open_pages(self, layers) except -1:
        """The same of layers that lie in pages."""
        cdef _Place *place
        cdef _Buffer *buffer
        cdef _Pages *pages
        for number in self._numbers:
            place = self._places + <int64_t>number
            layer = layers[number]
            given, pools, shown = layer.pages, layer.pools, layer.shown
            self._kept.append((given, pools, shown))
            buffer = &place.keys
            for states, pool in zip(shown, pools):
                _, buffer.heads, buffer.depth = states.shape
                fits = states.is_contiguous() and pool.stride() == states.stride()
                if not fits or not states.dtype == pool.dtype == self._dtype:
                    raise ValueError(f"layer {number}: expected pages of {self._dtype}, one slot behind another")
                buffer.batch, buffer.data = 1, <char *><uintptr_t>states.data_ptr()
                buffer.strides = [0, buffer.depth, buffer.heads * buffer.depth]
                buffer = &place.values
            place.start, place.first, place.base, place.apart = 0, 0, 0, True
            place.extent = place.length = given.slots
            place.runs, place.run_count = <const _Run *><uintptr_t>given.runs.data_ptr(), <int>given.runs.size(0)
            pages = &place.pages
            pages.keys, pages.values = <char *><uintptr_t>pools[0].data_ptr(), <char *><uintptr_t>pools[1].data_ptr()
            pages.sources = <const int64_t *><uintptr_t>given.sources.data_ptr()
            pages.seen = <const int64_t *><uintptr_t>given.seen.data_ptr()
            pages.written = <const int64_t *><uintptr_t>given.written.data_ptr()
            pages.read, pages.tokens = given.sources.size(0), given.written.size(0)
        return 0

    def close(self):
        """Forget what was given."""
        self._kept, self._masks, self._read = [], (), None


cdef class RepeatedUpdate:
    """Keys and values that stay where they are, copied anew into a layer.

    Args:
        layer: its number.
        paged: whether it lies in pages.
        key, value: [batch, heads, n, depth].

    Raises:
        ValueError: they are no plain tensors with adjacent elements.
    """

    cdef element_problem _problems[6]
    cdef object _states
    cdef readonly int layer
    cdef readonly bint paged

    def __init__(self, int layer, bint paged, key, value):
        cdef int i
        self.layer, self.paged, self._states = layer, paged, (key, value)
        for i, states in enumerate(self._states):
            fits = PATHS and states.dtype in _dtypes and _is_plain(states, states.dtype)
            if not fits or states.dim() != 4 or states.stride(3) != 1 or states.numel() == 0:
                raise ValueError(f"layer {layer}: expected plain keys and values, adjacent elements of four axes")
            self._problems[i].kind, self._problems[i].dtype = ELEMENT_COPY, _dtypes[states.dtype]
            self._problems[i].a = self._problems[i].b = <char *><uintptr_t>states.data_ptr()
            self._problems[i].shape, self._problems[i].placed = states.shape, 2
            self._problems[i].strides[0] = states.stride()

    @property
    def dtype(self):
        return self._states[0].dtype

    @property
    def tokens(self):
        return self._states[0].size(2)

    cdef int place(self, GivenLayers given) except -1:
        """Let the copies go where a forward writes to."""
        cdef _Place *place = given._places + self.layer
        cdef _Buffer *buffer = &place.keys
        cdef element_problem *p
        cdef int64_t start
        cdef bint fits
        cdef int i
        for i in range(2):
            p = self._problems + i
            if self.paged:
                fits = p.shape[0] == 1 and place.pages.tokens <= self.tokens
            elif place.apart:
                fits = p.shape[0] * p.shape[2] == given._tokens
            else:
                fits = p.shape[0] == buffer.batch and p.shape[2] == place.extent - place.start
            if not fits or p.shape[1] != buffer.heads or p.shape[3] != buffer.depth:
                raise ValueError(
                    f"layer {self.layer}: expected room for {list(self._states[i].shape)}, got "
                    f"{[buffer.batch, buffer.heads, place.extent - place.start, buffer.depth]}"
                )
            # Where rows differ, slots are counted from the first that there ever was.
            start = -place.base if place.apart else place.start
            p.out = buffer.data + start * buffer.strides[2] * skinny_item_bytes(p.dtype)
            p.places = given._slots if place.apart else NULL
            p.strides[2] = [buffer.strides[0], buffer.strides[1], buffer.strides[2], 1]
            if self.paged:
                self.turn_pages(&place.pages, place.pages.values if i else place.pages.keys, p)
            buffer = &place.values
        return 0

    cdef void turn_pages(self, const _Pages *pages, char *pool, element_problem *seen):
        """Let keys, or values, be copied from pages to where new ones are seen with them, and these back."""
        cdef element_problem *copied = seen + 2
        cdef element_problem *written = seen + 4
        seen.shape[2], seen.places = pages.tokens, pages.seen
        copied[0] = written[0] = seen[0]
        written.out, written.places = pool, pages.written
        copied.a, copied.places, copied.placed = pool, pages.sources, 0
        copied.shape = [1, 1, pages.read, seen.shape[1] * seen.shape[3]]
        copied.strides[0] = [0, 0, copied.shape[3], 1]
        copied.strides[2] = [0, 0, copied.shape[3], 1]


cdef class RepeatedAttend(_Attention):
    """:func:`kernel_attention` of queries that stay where they are over what a layer has shown, computed anew.

    Args:
        query, scale: as for :func:`kernel_attention`.
        out: [batch, queries, heads, width], contiguous, which every call writes to.
        layer, mask: their numbers; None: there is no mask.

    Raises:
        ValueError: a query's elements are not adjacent.
    """

    cdef object _mask
    cdef int _layer
    cdef attention_problem *_rows  # where they have different lengths
    cdef int _room

    def __dealloc__(self):
        free(self._rows)

    def __init__(self, query, scale, out, int layer, mask):
        if query.stride(3) != 1:
            raise ValueError(f"query: expected adjacent elements, got strides {query.stride()}")
        super().__init__(query, scale, out)
        self._layer, self._mask = layer, mask
        _describe(query, self._problem.query_strides, &self._problem.query)

    cdef int place(self, GivenLayers given, dict seen, operation *as_operation) except -1:
        """Let it read what a forward shows.

        Args:
            seen: attention whose masks are known in this forward, by these.
            as_operation: what computes it.
        """
        cdef _Attention like
        cdef attention_problem *p = &self._problem
        cdef _Place *place = given._places + self._layer
        cdef int64_t bytes = skinny_item_bytes(p.dtype)
        cdef bint fits
        if place.apart:
            fits = p.batch * p.queries == given._tokens
        else:
            fits = p.batch == place.keys.batch
        if not fits or place.keys.depth != p.depth or self._heads % place.keys.heads:
            raise ValueError(f"layer {self._layer}: expected keys that fit {list(self._query.shape)}")
        p.groups, p.width = place.values.heads, place.values.depth
        p.heads, p.slots = self._heads // p.groups, place.extent - place.first
        p.key = place.keys.data + place.first * place.keys.strides[2] * bytes
        p.value = place.values.data + place.first * place.values.strides[2] * bytes
        p.key_strides, p.value_strides = place.keys.strides, place.values.strides
        mask = None if self._mask is None else given._masks[self._mask]
        if place.apart and mask is not None:
            p.slots = mask.size(3)  # which are not those of rows that are not fed
        like = seen.get(self._mask)
        if (
            like is not None and like._problem.slots == p.slots and like._problem.queries == p.queries
            and like._problem.batch == p.batch and like._heads == self._heads
        ):
            p.mask, p.mask_kind = like._problem.mask, like._problem.mask_kind
            p.mask_strides = like._problem.mask_strides
        else:
            self.see(mask)
            seen[self._mask] = self
        as_operation.problem, as_operation.count = p, 1
        if place.apart:
            self.part(given, place, as_operation)
        return 0

    cdef int part(self, GivenLayers given, const _Place *place, operation *as_operation) except -1:
        """Let each row's tokens read what the layer has of that row."""
        cdef attention_problem *whole = <attention_problem *>as_operation.problem
        cdef attention_problem *p
        cdef int64_t bytes = skinny_item_bytes(whole.dtype), heads = whole.groups * whole.heads
        cdef int64_t mask_bytes = 1 if whole.mask_kind == MASK_BOOL else bytes
        cdef const _Run *run
        cdef int i
        if place.run_count > self._room:
            free(self._rows)
            self._rows = <attention_problem *>calloc(place.run_count, sizeof(attention_problem))
            self._room = 0 if self._rows == NULL else place.run_count
            if self._rows == NULL:
                raise MemoryError("no memory for attention of rows")
        for i in range(place.run_count):
            run, p = place.runs + i, self._rows + i
            p[0] = whole[0]
            p.batch, p.queries, p.slots = 1, run.count, run.end - run.first - place.base - place.first
            if run.first + p.slots > whole.slots:
                raise ValueError(f"mask: expected at least {p.slots} slots of row {run.row}, got {whole.slots}")
            p.query += (run.line * whole.query_strides[0] + run.begin * whole.query_strides[2]) * bytes
            p.out += (run.line * whole.queries + run.begin) * heads * whole.width * bytes
            p.key += (run.row * whole.key_strides[0] + run.first * whole.key_strides[2]) * bytes
            p.value += (run.row * whole.value_strides[0] + run.first * whole.value_strides[2]) * bytes
            if whole.mask_kind != MASK_NONE:
                p.mask += (run.line * whole.mask_strides[0] + run.begin * whole.mask_strides[2] + run.first) * mask_bytes
        as_operation.problem, as_operation.count = self._rows, place.run_count
        return 0


cdef class CompiledOperators:
    """Operators one after another in one call.

    Args:
        operators: each one that `can_compile`.
        given: what the latter are given.
    """

    cdef program _program
    cdef list _operators
    cdef list _placed  # those on the cache, with the number of the first operation of each
    cdef GivenLayers _given

    def __cinit__(self, operators, GivenLayers given):
        cdef RepeatedUpdate update
        cdef operation *next
        cdef int i
        self._operators, self._given = list(operators), given
        self._placed = []
        self._program.operations = <operation *>calloc(6 * len(self._operators) + 1, sizeof(operation))
        if self._program.operations == NULL:
            raise MemoryError("no memory for the operators of a program")
        next = self._program.operations
        for operator in self._operators:
            if isinstance(operator, (RepeatedUpdate, RepeatedAttend)):
                self._placed.append((operator, next - self._program.operations))
            if isinstance(operator, RepeatedUpdate):
                update = operator
                for i in [2, 3, 0, 1, 4, 5] if update.paged else [0, 1]:
                    next.kind, next.count, next.problem = OPERATION_ELEMENTS, 1, &update._problems[i]
                    next += 1
                continue
            next[0] = (<RepeatedOperator>operator)._operation
            next += 1
        self._program.count = <int>(next - self._program.operations)

    def __dealloc__(self):
        free(self._program.operations)
        free_program(&self._program)

    def __call__(self):
        cdef int threads = _get_num_threads(), failed
        cdef dict seen = {}
        cdef int64_t i
        for placed, i in self._placed:
            if isinstance(placed, RepeatedUpdate):
                (<RepeatedUpdate>placed).place(self._given)
            else:
                (<RepeatedAttend>placed).place(self._given, seen, self._program.operations + i)
        with nogil:
            failed = run_program(&self._program, _paths + _path_count - 1, threads)
        if failed:
            raise MemoryError(f"no memory for a program of {self._program.count} operators")


def can_compile(operator):
    """Whether an operator may be one of `CompiledOperators`."""
    if isinstance(operator, (RepeatedUpdate, RepeatedAttend)):
        return True
    if not isinstance(operator, RepeatedOperator) or not PATHS:
        return False
    cdef operation *described = &(<RepeatedOperator>operator)._operation
    if described.problem == NULL:
        return False
    return described.kind != OPERATION_LINEARS or (<linear_problem *>described.problem).rows <= PASS_ROWS
