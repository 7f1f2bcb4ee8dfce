# Attention of a few queries over a cache of keys and values. PyTorch's masked attention on a CPU wants
# a key and value head for each query head, so that shared heads are copied first, and its time grows
# with the queries long before arithmetic bounds it.

cdef object _bool = torch.bool


cdef object _describe(object tensor, int64_t *strides, const char **data):
    """Note where a tensor of four axes lies; returns one whose last axis is adjacent."""
    if tensor.stride(3) != 1:
        tensor = tensor.contiguous()
    strides[0], strides[1], strides[2], _ = tensor.stride()
    data[0] = <char *><uintptr_t>tensor.data_ptr()
    return tensor


def kernel_attention(query, key, value, mask=None, scale=None, *, path=None, threads=None):
    """`softmax(query @ key.T * scale + mask) @ value`, made for a few queries and heads that share
    keys and values.

    Scores, weights and sums are float32, rounded once to the dtype. A query gives the same bits
    whatever queries stand beside it, however many threads work, and wherever masked slots stand
    between those that it sees; they differ between paths. A query that a boolean mask or −inf hides
    everything from gives zeros, and the smallest finite number in an additive mask hides a slot from
    queries that see another one, as in PyTorch. Not differentiable.

    Args:
        query: [batch, heads, queries, depth], float32, bfloat16 or float16; it, the key, the value and
            the mask have to be what `can_attend` accepts, of however many queries.
        key: [batch, groups, slots, depth]; consecutive heads / groups query heads share a group.
        value: [batch, groups, slots, width], width a multiple of 16.
        mask: broadcasts to [batch, heads, queries, slots]; boolean, True where a slot is seen, or of
            the dtype, to be added; None: everything is seen.
        scale: of the scores; None: depth ** -0.5.
        path: one of `PATHS`, the instruction sets this CPU has; None: the last of them.
        threads: at most so many; None: `torch.get_num_threads()`.

    Returns:
        [batch, queries, heads, width], contiguous.

    Raises:
        ValueError: no such path, or `threads` is not positive.
    """
    cdef int chosen = _path_index(path), most = _thread_count(threads)
    batch, heads, queries, _ = query.shape
    out = _empty((batch, queries, heads, value.size(3)), dtype=query.dtype, device=_cpu)
    _Attention(query, scale, out).attend(key, value, mask, chosen, most)
    return out


cdef class _Attention(RepeatedOperator):
    """Attention of queries to whatever keys and values, into memory that is given."""

    cdef attention_problem _problem
    cdef int64_t _heads
    cdef object _query
    cdef object _out
    cdef object _seen

    def __init__(self, query, scale, out):
        self._problem.batch, self._heads, self._problem.queries, self._problem.depth = query.shape
        self._problem.scale = 1 / sqrt(self._problem.depth) if scale is None else scale
        self._problem.dtype = _dtypes[query.dtype]
        self._problem.out = <char *><uintptr_t>out.data_ptr()
        self._query, self._out = query, out
        self._operation.kind, self._operation.problem = OPERATION_ATTENTION, &self._problem
        self._operation.count = 1

    cdef int attend(self, object key, object value, object mask, int path, int threads) except -1:
        cdef attention_problem *p = &self._problem
        cdef int failed
        _, p.groups, p.slots, p.width = value.shape
        if self._out.numel() == 0 or p.slots == 0:
            self._out.zero_()
            return 0
        p.heads = self._heads // p.groups
        query = _describe(self._query, p.query_strides, &p.query)
        key = _describe(key, p.key_strides, &p.key)
        value = _describe(value, p.value_strides, &p.value)
        self.see(mask)
        with nogil:
            failed = run_attention(p, _paths + path, threads)
        if failed:
            raise MemoryError(f"no memory for {p.heads * p.queries} rows of {p.slots} scores")
        return 0

    cdef int see(self, object mask) except -1:
        """Note the mask of queries and slots."""
        cdef attention_problem *p = &self._problem
        p.mask, p.mask_strides, p.mask_kind = NULL, [0, 0, 0], MASK_NONE
        if mask is None:
            return 0
        full = p.batch, self._heads, p.queries, p.slots
        if mask.shape != full:
            mask = mask.expand(full)
        self._seen = _describe(mask, p.mask_strides, &p.mask)
        p.mask_kind = MASK_BOOL if mask.dtype is _bool else MASK_ADDED
        return 0


cdef bint _fits(object query, object key, object value):
    """Whether the shapes of queries, keys and values belong together."""
    return (
        query.dim() == key.dim() == value.dim() == 4
        and query.size(0) == key.size(0) == value.size(0)
        and key.size(1) == value.size(1) > 0
        and query.size(1) % key.size(1) == 0
        and key.size(2) == value.size(2)
        and query.size(3) == key.size(3) > 0
        and value.size(3) % WIDTH_MULTIPLE == 0
    )


cdef bint _mask_fits(object mask, object query, object key):
    """Whether a mask of four axes stands for [batch, heads, queries, slots]."""
    full = (query.size(0), query.size(1), query.size(2), key.size(2))
    return mask.dim() == 4 and all(
        [have == want or have == 1 for have, want in zip(mask.shape, full)]
    )


def can_attend(query, key, value, mask):
    """Whether attention may be computed here: few queries of plain tensors that fit, and nobody who
    records or transforms it.
    """
    dtype = getattr(query, "dtype", None)
    if not PATHS or dtype not in _dtypes:
        return False
    if not (_is_plain(query, dtype) and _is_plain(key, dtype) and _is_plain(value, dtype)):
        return False
    if not _fits(query, key, value) or not 0 < query.size(2) <= _most_rows():
        return False
    if mask is not None:
        if not _is_plain(mask, _bool if mask.dtype is _bool else dtype):
            return False
        if not _mask_fits(mask, query, key):
            return False
    recorded = _is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
        or (mask is not None and mask.requires_grad)
    )
    return not (recorded or _is_transformed())
