# Linear layers of a few input rows. PyTorch's `linear` is made for one row or for hundreds; between
# them its time grows with the rows although the memory traffic, which bounds it, does not.

MAX_ROWS = ROUTED_ROWS
FEW_ROWS = 16
INT4_OUTPUTS, INT4_COLUMNS, INT4_BLOCK = INT4_ROWS, INT4_GROUP, INT4_BLOCK_BYTES  # a block in four bits
INT8_MULTIPLE = INT8_STEP  # rows in eight bits are filled up to a multiple of so many columns


cdef class Matrix:
    """A linear layer's weight, [outputs, depth], as products read it where it lies; made by `dense`, `int8` or
    `int4`. What these are given is the package's own, and has to fit."""

    cdef linear_problem _problem
    cdef object _kept

    @property
    def outputs(self):
        return self._problem.outputs


cdef int _describe_weight(linear_problem *problem, object weight, int dtype, object scales=None) except -1:
    """Note where a matrix [outputs, depth] lies, and the scales of its rows, if they have some."""
    problem.outputs, problem.depth = weight.shape
    problem.weight = <char *><uintptr_t>weight.data_ptr()
    problem.weight_stride = weight.stride(0)
    problem.weight_dtype = dtype
    problem.scales, problem.scale_dtype = NULL, SKINNY_FLOAT32
    if scales is not None:
        problem.scales, problem.scale_dtype = <char *><uintptr_t>scales.data_ptr(), _dtypes[scales.dtype]
    return 0


def dense(weight):
    """A matrix as it is: float32, bfloat16 or float16, adjacent columns. Products are of its dtype; those of bfloat16
    may be of float32, and have the bits of the same matrix in float32.
    """
    matrix = Matrix()
    matrix._kept = weight
    _describe_weight(&matrix._problem, weight, _dtypes[weight.dtype])
    return matrix


def int8(values, scales, depth=None):
    """`scales[:, None] * values`, of which products are summed in float32.

    Args:
        values: int8 [outputs, columns], adjacent.
        scales: float32, bfloat16 or float16, as many as there are outputs, contiguous.
        depth: of what `pack_int8` gave: a row of x is then rounded to 14 bits, one scale a row, products are summed
            as integers, and a row that is not finite gives NaN; None: x is taken as it is.
    """
    matrix = Matrix()
    matrix._kept = values, scales
    _describe_weight(&matrix._problem, values, SKINNY_INT8, scales)
    if depth is not None:
        matrix._problem.depth, matrix._problem.weight_dtype = depth, SKINNY_ROUNDED
    return matrix


def int4(blocks, int64_t outputs, int64_t depth):
    """What `pack_int4` gave for a matrix [outputs, depth].

    A row of x is rounded to eight bits, with a scale for each group of neighbours; products within a group are summed
    as integers, groups in float32. What is not finite gives what is not, in its own row or output.
    """
    matrix = Matrix()
    matrix._kept = blocks
    _describe_weight(&matrix._problem, blocks, SKINNY_INT4)
    matrix._problem.outputs, matrix._problem.depth = outputs, depth
    matrix._problem.weight_stride = skinny_parts(depth, INT4_GROUP) * INT4_ROW_BYTES
    return matrix


cdef object _solve(linear_problem *problem, object x, object bias, int path, int threads):
    """The product of x with the weights of a problem, plus bias; all of them known to fit."""
    cdef int failed
    cdef tuple shape = tuple(x.shape)
    # `new_empty` takes three times as long.
    out = _empty(shape[: len(shape) - 1] + (problem.outputs,), dtype=x.dtype, device=_cpu)
    if problem.depth == 0:
        return out.zero_() if bias is None else out.copy_(bias)
    kept = _describe_rows(problem, x, bias, out)
    with nogil:
        failed = run_linears(problem, 1, _paths + path, threads)
    if failed:
        raise MemoryError(f"no memory to pack {problem.rows} rows of {problem.depth}")
    return out


cdef object _describe_rows(linear_problem *problem, object x, object bias, object out):
    """Note where x, bias and the result lie; returns what has to be kept while they are read."""
    assert x.size(-1) == problem.depth and out.size(-1) == problem.outputs
    problem.x_stride = problem.depth
    if not x.is_contiguous():
        x = x.reshape(-1, problem.depth)
        if x.stride(1) != 1:
            x = x.contiguous()
        problem.x_stride = x.stride(0)
    if bias is not None:
        bias = bias.contiguous()
    problem.x = <char *><uintptr_t>x.data_ptr()
    problem.rows = <int64_t>x.numel() // problem.depth
    problem.bias = NULL if bias is None else <char *><uintptr_t>bias.data_ptr()
    problem.dtype = _dtypes[out.dtype]
    problem.y = <char *><uintptr_t>out.data_ptr()
    problem.y_stride = problem.outputs
    return x, bias


def product(x, Matrix matrix, bias=None, *, path=None, threads=None):
    """`x @ matrix.T + bias`, made for 1 to 64 rows of x; more rows read the weights again per 64.

    Sums are float32 fused multiply-adds, scaled and rounded once to x's dtype. A row of x gives the same bits whatever
    rows stand beside it and however many threads work; they differ between paths. Not differentiable.

    Args:
        x: [..., depth], float32, bfloat16 or float16, any strides.
        bias: [outputs] of x's dtype, or None.
        path: one of `PATHS`, the instruction sets this CPU has; None: the last of them.
        threads: at most so many; None: `torch.get_num_threads()`.

    Raises:
        ValueError: no such path, or `threads` is not positive.
        RuntimeError: this CPU has no path, here and in all other kernels but norms.
    """
    cdef linear_problem problem = matrix._problem
    return _solve(&problem, x, bias, _path_index(path), _thread_count(threads))


def skinny_linear(x, weight, bias=None, *, path=None, threads=None):
    """:func:`product` with a matrix as it is; see `dense`."""
    cdef linear_problem problem
    _describe_weight(&problem, weight, _dtypes[weight.dtype])
    return _solve(&problem, x, bias, _path_index(path), _thread_count(threads))


cdef class RepeatedLinears(RepeatedOperator):
    """:func:`product` of tensors that stay where they are, computed anew by every call."""

    cdef linear_problem _problems[MAX_TOGETHER]
    cdef list _kept

    def __init__(self, x, Matrix matrix, bias, out):
        """
        Args:
            x, matrix, bias: as for :func:`product`.
            out: [..., outputs], its rows at equal distances, which every call writes to.

        Raises:
            ValueError: rows of x do not lie at equal distances.
        """
        self._operation.kind, self._operation.problem = OPERATION_LINEARS, &self._problems[0]
        self._operation.count, self._kept = 0, []
        self._add(x, matrix, bias, out)

    def add(self, x, Matrix matrix, bias, out):
        """Compute another layer of the same x together with these, if that can be; whether it can."""
        cdef linear_problem *first = self._problems
        if self._operation.count == MAX_TOGETHER or matrix._problem.weight_dtype != first.weight_dtype:
            return False
        self._add(x, matrix, bias, out)
        cdef linear_problem *last = self._problems + self._operation.count - 1
        if last.x == first.x and last.x_stride == first.x_stride and last.rows == first.rows:
            return True
        self._operation.count -= 1
        self._kept.pop()
        return False

    cdef int _add(self, object x, Matrix matrix, object bias, object out) except -1:
        cdef linear_problem *problem = self._problems + self._operation.count
        problem[0] = matrix._problem
        described = _describe_rows(problem, x, bias, out)
        if problem.x != <char *><uintptr_t>x.data_ptr():
            raise ValueError(f"x: expected rows at equal distances, got strides {x.stride()}")
        problem.y_stride = out.view(-1, problem.outputs).stride(0)
        self._kept.append((out, x, matrix, described))
        self._operation.count += 1
        return 0

    def __call__(self):
        cdef int threads = _get_num_threads(), failed
        cdef int path = <int>len(PATHS) - 1
        with nogil:
            failed = run_linears(self._problems, self._operation.count, _paths + path, threads)
        if failed:
            raise MemoryError("no memory to pack the rows of a linear layer")


cdef weight_packing _packing_of(object weight, object values) except *:
    """A matrix that is to be rounded, and where to."""
    cdef weight_packing packing
    packing.outputs, packing.depth = weight.shape
    packing.weight = <char *><uintptr_t>weight.data_ptr()
    packing.weight_stride = weight.stride(0)
    packing.dtype = _dtypes[weight.dtype]
    packing.values = <char *><uintptr_t>values.data_ptr()
    return packing


cdef int _run_step(work_step step, object threads) except -1:
    cdef work_progress progress
    cdef int count = _thread_count(threads)
    with nogil:
        run_steps(&step, &progress, 1, count)
    return 0


def pack_int8(weight, *, path=None, threads=None):
    """Round a matrix to eight bits: a weight becomes `scale[row] * value`, with values from -127 to 127 and
    the row's greatest magnitude over 127 for its scale.

    Args:
        weight: as for `dense`.
        path, threads: as for `product`.

    Returns:
        values: int8 [outputs, steps * 64], filled up with zeros.
        scales: float32 [outputs]; NaN for rows that are not finite.
        left_out: float32 [outputs], the Euclidean norm of what rounding takes from a row, rounded up.
        norms: float32 [outputs], of the rows themselves, rounded up.
    """
    cdef int chosen = _path_index(path)
    outputs, depth = weight.shape
    values = torch.empty((outputs, skinny_parts(depth, INT8_STEP) * INT8_STEP), dtype=torch.int8)
    scales, left_out, norms = torch.empty((3, outputs)).unbind()
    cdef weight_packing packing = _packing_of(weight, values)
    packing.scales = <float *><uintptr_t>scales.data_ptr()
    packing.left_out = <float *><uintptr_t>left_out.data_ptr()
    packing.norms = <float *><uintptr_t>norms.data_ptr()
    _run_step(_paths[chosen].int8_step(&packing), threads)
    return values, scales, left_out, norms


def pack_int4(weight, column_weights=None, *, path=None, threads=None):
    """Round a matrix to four bits: a weight becomes `scale * level`, one of 16 levels that lie closer near zero, as
    those of NF4 (QLoRA, section 3), and, of those tried for each 32 neighbours of a row, the scale in float16 that
    leaves out the least square.

    Args:
        weight: as for `dense`.
        column_weights: float32 [depth], at least 0: how much what is left out of a column counts, which is most
            useful as the mean square of what it is multiplied by; None: as much as of any other.
        path, threads: as for `product`.

    Returns:
        uint8 [blocks of 16 outputs, bytes], as `int4` takes them; linear_kernels.h says how.
    """
    cdef int chosen = _path_index(path)
    outputs, depth = weight.shape
    row_bytes = skinny_parts(depth, INT4_GROUP) * INT4_BLOCK_BYTES
    blocks = torch.empty((skinny_parts(outputs, INT4_ROWS), row_bytes), dtype=torch.uint8)
    counts = torch.ones(depth, dtype=torch.float32) if column_weights is None else column_weights.contiguous()
    cdef weight_packing packing = _packing_of(weight, blocks)
    packing.column_weights = <float *><uintptr_t>counts.data_ptr()
    _run_step(_paths[chosen].int4_step(&packing), threads)
    return blocks


cdef object _plain_linear = torch._C._nn.linear


cdef bint _is_native(str name):
    """Whether oneDNN, which PyTorch asks for products of many rows, has instructions of this CPU for a type; it is
    taken to where PyTorch was built without."""
    supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    return supported is None or supported()


# Half precision whose products of many rows take PyTorch several times as long as the kernels.
cdef dict _half = {"bf16": torch.bfloat16, "fp16": torch.float16}
ANY_ROWS = frozenset([dtype for name, dtype in _half.items() if not _is_native(name)])

# Whose products of a few dozen rows take PyTorch longer, which brings weights into another order for each.
cdef object _tiled = frozenset([torch.bfloat16] if "amx" in PATHS else [])


cdef int64_t _most_rows():
    """How many the kernels take, of products and of one text's queries: rows of a few texts, or of their
    drafts."""
    return ROUTED_ROWS if thread_verifies else FEW_ROWS


cdef bint _is_recorded(object x, object weight, object bias):
    """Whether autograd would record the product."""
    return _is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )


cdef bint _are_few_rows(object x, object weight, object bias, object dtype):
    """Whether x and bias are plain tensors that fit a matrix, few rows, and nobody records or transforms
    their product.
    """
    if not _is_plain(x, dtype) or x.dim() < 1:
        return False
    outputs, depth = weight.shape
    if depth == 0 or x.size(-1) != depth or x.numel() == 0:
        return False
    cdef int64_t rows = <int64_t>x.numel() // <int64_t>depth
    if rows > _most_rows() and not (rows <= ROUTED_ROWS and dtype in _tiled) and dtype not in ANY_ROWS:
        return False
    if bias is not None and (not _is_plain(bias, dtype) or bias.shape != (outputs,)):
        return False
    return not (_is_recorded(x, weight, bias) or _is_transformed())


cpdef bint can_multiply(input, weight, bias=None):
    """Whether `routed_linear` computes a product by the kernel: inside a scope of this thread, of few rows of
    plain tensors that fit, which nobody records or transforms.
    """
    dtype = getattr(weight, "dtype", None)
    return (
        in_route()
        and PATHS
        and dtype in _dtypes
        and _is_plain(weight, dtype)
        and weight.dim() == 2
        and weight.is_contiguous()
        and _are_few_rows(input, weight, bias, dtype)
    )


def routed_linear(input, weight, bias=None):
    """`torch.nn.functional.linear`, by the kernel where it can."""
    if can_multiply(input, weight, bias):
        return skinny_linear(input, weight, bias)
    return _plain_linear(input, weight, bias)


def routed_scaled(x, values, scales, dtype, bias=None):
    """The product with `int8(values, scales)` inside a scope of this thread, of a few rows of plain tensors that nobody
    records or transforms; None otherwise.

    Args:
        x, values, bias: as for `product` and `int8`.
        scales: contiguous, as many as `values` has rows, in any shape.
        dtype: that x and the bias must have.
    """
    if (
        thread_depth == 0
        or dtype not in _dtypes
        or not _is_plain(values, torch.int8)
        or scales.dtype not in _dtypes
        or not _is_plain(scales, scales.dtype)
        or not (values.is_contiguous() and scales.is_contiguous())
        or values.dim() != 2
        or scales.numel() != values.size(0)
        or not _are_few_rows(x, values, bias, dtype)
        or _is_recorded(x, scales, bias)
    ):
        return None
    return product(x, int8(values, scales), bias)


def verifies():
    """Whether this thread verifies drafts, of which the kernels take up to `MAX_ROWS` rows."""
    return bool(thread_verifies)


def set_verifies(bint verifies):
    """Say whether it does."""
    global thread_verifies
    thread_verifies = verifies


def route_depth():
    """How many scopes this thread is in."""
    return thread_depth


def set_route_depth(int depth):
    """Let this thread be in so many; in one or more the kernels compute what they can."""
    global thread_depth
    thread_depth = depth


cpdef bint in_route():
    """Whether this thread is inside a scope, and nothing watches or replaces its operators."""
    return thread_depth > 0 and not _dispatch_modes() and not _function_modes()
