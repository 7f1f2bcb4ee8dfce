# Operators one after another in one call, with what a forward's cache and masks have to tell them.

cdef struct _Buffer:
    # Where the keys or values of a layer lie: [batch, heads, slots, depth] from the first slot there is.
    char *data
    int64_t strides[3]
    int64_t batch, heads, depth


cdef struct _Place:
    # What a forward writes to of a layer, from `start` on, and what it then sees of it; counted from the
    # first slot there is. `length` counts from the first that there ever was.
    _Buffer keys, values
    int64_t start, first, extent, length


cdef class GivenLayers:
    """What each layer of a cache is given by a forward that adds the same slots to all rows, and shows.

    Args:
        numbers: of the layers that are written to.
        dtype: of their keys and values.
    """

    cdef _Place *_places
    cdef list _numbers
    cdef object _dtype
    cdef object _masks
    cdef list _kept

    def __cinit__(self, numbers, dtype):
        self._numbers, self._dtype, self._kept, self._masks = list(numbers), dtype, [], ()
        self._places = <_Place *>calloc(max(self._numbers, default=0) + 1, sizeof(_Place))
        if self._places == NULL:
            raise MemoryError("no memory for the places of layers")

    def __dealloc__(self):
        free(self._places)

    def open(self, layers, masks, int64_t tokens):
        """Make room for so many tokens more in all layers, and let them hold these; False, and none of them
        does, where they are not written to one stretch of slots in blocks.

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
        now.start, now.first, now.length = 0, 0, 0
        held, viewed, kept = None, None, []
        for number in self._numbers:
            layer = layers[number]
            store = layer.store
            view = layer.slots.views[layer.is_sliding]
            if view is None:
                now.start, now.first, now.length = store.length, -1, store.length + tokens
            elif view is not viewed:
                if view.places is not None or view.extent is None:
                    return False
                now.start, now.length = view.start, view.extent
                now.first = -1 if view.first is None else view.first
            viewed = view
            place = self._places + <int64_t>number
            place.start, place.first, place.length = now.start, now.first, now.length
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
            place.start, place.extent = place.start - <int64_t>base, place.length - <int64_t>base
            place.first = 0 if place.first < 0 else place.first - <int64_t>base
        for number in self._numbers:
            layers[number].store.length = self._places[<int64_t>number].length
        self._kept, self._masks = kept, masks
        return True

    def close(self):
        """Forget what was given."""
        self._kept, self._masks = [], ()


cdef class RepeatedUpdate:
    """Keys and values that stay where they are, copied anew into a layer.

    Args:
        update: the layer's own way of doing it.
        layer: its number.
        key, value: [batch, heads, n, depth].
    """

    cdef element_problem _problems[2]
    cdef object _update
    cdef object _states
    cdef int _layer
    cdef readonly bint compiles

    def __init__(self, update, int layer, key, value):
        cdef int i
        self._update, self._layer, self._states = update, layer, (key, value)
        self.compiles = True
        for i, states in enumerate(self._states):
            fits = PATHS and states.dtype in _dtypes and _is_plain(states, states.dtype)
            if not fits or states.dim() != 4 or states.stride(3) != 1 or states.numel() == 0:
                self.compiles = False
                return
            self._problems[i].kind, self._problems[i].dtype = ELEMENT_COPY, _dtypes[states.dtype]
            self._problems[i].a = self._problems[i].b = <char *><uintptr_t>states.data_ptr()
            self._problems[i].shape = states.shape
            self._problems[i].strides[0] = states.stride()

    def __call__(self):
        self._update(self._layer, *self._states)

    @property
    def layer(self):
        return self._layer

    @property
    def dtype(self):
        return self._states[0].dtype

    @property
    def tokens(self):
        return self._states[0].size(2)

    cdef int place(self, GivenLayers given) except -1:
        """Let the copies go where a forward writes to."""
        cdef _Place *place = given._places + self._layer
        cdef _Buffer *buffer = &place.keys
        cdef element_problem *p
        cdef int i
        for i in range(2):
            p = self._problems + i
            if (
                p.shape[0] != buffer.batch or p.shape[1] != buffer.heads or p.shape[3] != buffer.depth
                or p.shape[2] != place.extent - place.start
            ):
                raise ValueError(
                    f"layer {self._layer}: expected room for {list(self._states[i].shape)}, got "
                    f"{[buffer.batch, buffer.heads, place.extent - place.start, buffer.depth]}"
                )
            p.out = buffer.data + place.start * buffer.strides[2] * skinny_item_bytes(p.dtype)
            p.strides[2] = [buffer.strides[0], buffer.strides[1], buffer.strides[2], 1]
            buffer = &place.values
        return 0


cdef class RepeatedAttend:
    """Attention over what a layer has shown, computed anew.

    Args:
        attend: the way to do it, of what computes it, the layer's number and the mask's.
        again: computes it from keys, values and a mask.
        layer, mask: their numbers; None: there is no mask.
    """

    cdef object _attend
    cdef object _again
    cdef object _mask
    cdef int _layer

    def __init__(self, attend, again, int layer, mask):
        self._attend, self._again, self._layer, self._mask = attend, again, layer, mask

    def __call__(self):
        self._attend(self._again, self._layer, self._mask)

    @property
    def compiles(self):
        return isinstance(self._again, RepeatedAttention) and (<_Attention>self._again)._query.stride(3) == 1

    cdef int place(self, GivenLayers given, dict seen) except -1:
        """Let it read what a forward shows.

        Args:
            seen: attention whose masks are known in this forward, by these.
        """
        cdef _Attention again = self._again, like
        cdef attention_problem *p = &again._problem
        cdef _Place *place = given._places + self._layer
        cdef int64_t bytes = skinny_item_bytes(p.dtype)
        if place.keys.batch != p.batch or place.keys.depth != p.depth or again._heads % place.keys.heads:
            raise ValueError(f"layer {self._layer}: expected keys that fit {list(again._query.shape)}")
        p.groups, p.width = place.values.heads, place.values.depth
        p.heads, p.slots = again._heads // p.groups, place.extent - place.first
        p.key = place.keys.data + place.first * place.keys.strides[2] * bytes
        p.value = place.values.data + place.first * place.values.strides[2] * bytes
        p.key_strides, p.value_strides = place.keys.strides, place.values.strides
        known = seen.get(self._mask)
        if known is not None:
            like = known
            if (
                like._problem.slots == p.slots and like._problem.queries == p.queries
                and like._problem.batch == p.batch and like._heads == again._heads
            ):
                p.mask, p.mask_kind = like._problem.mask, like._problem.mask_kind
                p.mask_strides = like._problem.mask_strides
                return 0
        again.see(None if self._mask is None else given._masks[self._mask])
        seen[self._mask] = again
        return 0


cdef class CompiledOperators:
    """Operators one after another in one call.

    Args:
        operators: each a `RepeatedOperator`, or a `RepeatedUpdate` or `RepeatedAttend` that compiles.
        given: what the latter are given.
    """

    cdef program _program
    cdef list _operators
    cdef list _placed
    cdef GivenLayers _given

    def __cinit__(self, operators, GivenLayers given):
        cdef RepeatedUpdate update
        cdef RepeatedAttend attend
        cdef _Attention again
        cdef operation *next
        cdef int i
        self._operators, self._given = list(operators), given
        self._placed = [x for x in operators if not isinstance(x, RepeatedOperator)]
        self._program.operations = <operation *>calloc(2 * len(self._operators) + 1, sizeof(operation))
        if self._program.operations == NULL:
            raise MemoryError("no memory for the operators of a program")
        next = self._program.operations
        for operator in self._operators:
            if isinstance(operator, RepeatedUpdate):
                update = operator
                for i in range(2):
                    next.kind, next.count, next.problem = OPERATION_ELEMENTS, 1, &update._problems[i]
                    next += 1
                continue
            if isinstance(operator, RepeatedAttend):
                attend = operator
                operator = again = attend._again
                _describe(again._query, again._problem.query_strides, &again._problem.query)
            next[0] = (<RepeatedOperator>operator)._operation
            next += 1
        self._program.count = <int>(next - self._program.operations)

    def __dealloc__(self):
        free(self._program.operations)
        free_program(&self._program)

    def __call__(self):
        cdef int threads = _get_num_threads(), failed
        cdef dict seen = {}
        for placed in self._placed:
            if isinstance(placed, RepeatedUpdate):
                (<RepeatedUpdate>placed).place(self._given)
            else:
                (<RepeatedAttend>placed).place(self._given, seen)
        with nogil:
            failed = run_program(&self._program, _paths + _path_count - 1, threads)
        if failed:
            raise MemoryError(f"no memory for a program of {self._program.count} operators")


def can_compile(operator):
    """Whether an operator may be one of `CompiledOperators`."""
    if isinstance(operator, (RepeatedUpdate, RepeatedAttend)):
        return operator.compiles
    if not isinstance(operator, RepeatedOperator) or not PATHS:
        return False
    cdef operation *described = &(<RepeatedOperator>operator)._operation
    if described.problem == NULL or isinstance(operator, _Attention):
        return False
    return described.kind != OPERATION_LINEARS or (<linear_problem *>described.problem).rows <= PASS_ROWS
