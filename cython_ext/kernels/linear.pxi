# Linear layers of a few input rows. PyTorch's `linear` is made for one row or for hundreds; between
# them its time grows with the rows although the memory traffic, which bounds it, does not.

MAX_ROWS = ROUTED_ROWS
FEW_ROWS = 16
INT4_OUTPUTS, INT4_COLUMNS, INT4_BLOCK = INT4_ROWS, INT4_GROUP, INT4_BLOCK_BYTES  # a block in four bits
INT8_MULTIPLE = INT8_STEP  # rows in eight bits are filled up to a multiple of so many columns


cdef int _check_shape(str name, object tensor, object shape) except -1:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")
    return 0


cdef int _check_matrix(str name, object matrix, object dtype) except -1:
    _check_plain(name, matrix, dtype)
    if matrix.dim() != 2 or matrix.stride(1) != 1:
        raise ValueError(
            f"{name}: expected a matrix with adjacent columns, got shape {list(matrix.shape)} "
            f"with strides {list(matrix.stride())}"
        )
    return 0


cdef int _check_rows(object x, object dtype, int64_t outputs, int64_t depth, object bias) except -1:
    _check_plain("x", x, dtype)
    if x.dim() < 1 or x.size(-1) != depth:
        raise ValueError(f"x: expected shape [..., {depth}], got {list(x.shape)}")
    if bias is not None:
        _check_plain("bias", bias, dtype)
        _check_shape("bias", bias, (outputs,))
    return 0


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


cdef int _describe_weight(linear_problem *problem, object weight) except -1:
    problem.outputs, problem.depth = weight.shape
    problem.weight = <char *><uintptr_t>weight.data_ptr()
    problem.weight_stride = weight.stride()[0]
    problem.weight_dtype = _dtypes[weight.dtype]
    problem.scales, problem.scale_dtype = NULL, SKINNY_FLOAT32
    return 0


cdef object _multiply(object x, object weight, object bias, int path, int threads):
    """`skinny_linear` on arguments known to be valid."""
    cdef linear_problem problem
    _describe_weight(&problem, weight)
    return _solve(&problem, x, bias, path, threads)


cdef class RepeatedLinears(RepeatedOperator):
    """:func:`kernel_linear` of tensors that stay where they are, computed anew by every call."""

    cdef linear_problem _problems[MAX_TOGETHER]
    cdef list _kept

    def __init__(self, x, weight, bias, out, packed=None):
        """
        Args:
            x, weight, bias: as for :func:`kernel_linear`.
            out: [..., out_features], contiguous, which every call writes to.
            packed: what is read in the weight's place, with its `values` and `scales` as for
                `int8_linear`, or `int4_linear` where there are no scales; None: the weight.

        Raises:
            ValueError: rows of x do not lie at equal distances.
        """
        self._operation.kind, self._operation.problem = OPERATION_LINEARS, &self._problems[0]
        self._operation.count, self._kept = 0, []
        self._add(x, weight, bias, out, packed)

    def add(self, x, weight, bias, out, packed=None):
        """Compute another layer of the same x together with these, if that can be; whether it can."""
        cdef linear_problem *first = self._problems
        dtype = weight.dtype if packed is None else packed.values.dtype
        if self._operation.count == MAX_TOGETHER or dtype is not self._kept[0][1].dtype:
            return False
        self._add(x, weight, bias, out, packed)
        cdef linear_problem *last = self._problems + self._operation.count - 1
        if last.x == first.x and last.x_stride == first.x_stride and last.rows == first.rows:
            return True
        self._operation.count -= 1
        self._kept.pop()
        return False

    def new_out(self):
        """Let the next calls write what the only layer gives to another tensor, which is returned."""
        x, weight, out, described = self._kept[0]
        out = _empty_like(out)
        self._kept[0] = x, weight, out, described
        self._problems[0].y = <char *><uintptr_t>out.data_ptr()
        return out

    cdef int _add(self, object x, object weight, object bias, object out, object packed) except -1:
        cdef linear_problem *problem = self._problems + self._operation.count
        if packed is None:
            _describe_weight(problem, weight)
        elif packed.scales is None:
            weight = packed.values
            _read_blocks(problem, weight, out.size(-1), x.size(-1))
        else:
            weight = packed.values
            _read_values(problem, weight, packed.scales)
            problem.depth, problem.weight_dtype = x.size(-1), SKINNY_ROUNDED
        described = _describe_rows(problem, x, bias, out)
        if problem.x != <char *><uintptr_t>x.data_ptr():
            raise ValueError(f"x: expected rows at equal distances, got strides {x.stride()}")
        self._kept.append((x, weight, out, (described, packed)))
        self._operation.count += 1
        return 0

    def __call__(self):
        cdef int threads = _get_num_threads(), failed
        cdef int path = <int>len(PATHS) - 1
        with nogil:
            failed = run_linears(self._problems, self._operation.count, _paths + path, threads)
        if failed:
            raise MemoryError("no memory to pack the rows of a linear layer")


def skinny_linear(x, weight, bias=None, *, path=None, threads=None):
    """`x @ weight.T + bias`, made for 1 to 64 rows of x; more rows read the weights again per 64.

    Sums are float32 fused multiply-adds, rounded once to x's dtype. A row of x gives the same bits
    whatever rows stand beside it and however many threads work; they differ between paths. Not
    differentiable.

    Args:
        x: [..., in_features], any strides; of the weight's dtype, or float32 for a bfloat16 weight,
            which gives the bits of the same weight in float32.
        weight: [out_features, in_features], float32, bfloat16 or float16, adjacent columns.
        bias: [out_features] of x's dtype, or None.
        path: one of `PATHS`, the instruction sets this CPU has; None: the last of them.
        threads: at most so many; None: `torch.get_num_threads()`.

    Raises:
        TypeError: an argument is not a tensor of such a dtype.
        ValueError: shapes do not fit, a tensor is not dense on the CPU or requires grad, no such
            path, or `threads` is not positive.
        RuntimeError: this CPU has no path, here and in all other kernels but norms.
    """
    dtype = _dtype_of("weight", weight)
    _check_matrix("weight", weight, dtype)
    if dtype is torch.bfloat16 and getattr(x, "dtype", None) is torch.float32:
        dtype = torch.float32
    _check_rows(x, dtype, weight.size(0), weight.size(1), bias)
    return _multiply(x, weight, bias, _path_index(path), _thread_count(threads))


def kernel_linear(x, weight, bias):
    """`skinny_linear` with its defaults, on arguments known to be valid."""
    return _multiply(x, weight, bias, _path_index(None), _get_num_threads())


def chosen_linear(x, weight, ids):
    """`skinny_linear` of one row with some rows of a weight, to the bit.

    Args:
        x: [in_features], adjacent.
        weight: as for `skinny_linear`, of x's dtype.
        ids: int64 NumPy array [n], which of its rows.

    Returns:
        [n] of x's dtype.

    Raises:
        IndexError: a row that there is not; others as `skinny_linear`.
    """
    cdef const int64_t[::1] chosen = ids
    cdef linear_problem problem
    cdef int64_t i, bytes, stride, count = chosen.shape[0]
    cdef char *rows
    dtype = _dtype_of("weight", weight)
    _check_matrix("weight", weight, dtype)
    _check_rows(x, dtype, weight.size(0), weight.size(1), None)
    _describe_weight(&problem, weight)
    bytes = problem.depth * skinny_item_bytes(problem.weight_dtype)
    stride = problem.weight_stride * skinny_item_bytes(problem.weight_dtype)
    for i in range(count):
        if not 0 <= chosen[i] < problem.outputs:
            raise IndexError(f"ids: expected 0 to {problem.outputs - 1}, got {chosen[i]}")
    rows = <char *>calloc(max(1, count * bytes), 1)
    if rows == NULL:
        raise MemoryError(f"no memory for {count} rows of {problem.depth}")
    try:
        for i in range(count):
            memcpy(rows + i * bytes, problem.weight + chosen[i] * stride, bytes)
        problem.weight, problem.weight_stride, problem.outputs = rows, problem.depth, count
        return _solve(&problem, x, None, _path_index(None), _get_num_threads())
    finally:
        free(rows)


def pack_int8(weight, *, path=None, threads=None):
    """Round a matrix to eight bits: a weight becomes `scale[row] * value`, with values from -127 to 127 and
    the row's greatest magnitude over 127 for its scale.

    Args:
        weight, path, threads: as for `skinny_linear`.

    Returns:
        values: int8 [outputs, steps * 64], filled up with zeros.
        scales: float32 [outputs]; NaN for rows that are not finite.
        left_out: float32 [outputs], the Euclidean norm of what rounding takes from a row, rounded up.
        norms: float32 [outputs], of the rows themselves, rounded up.

    Raises:
        As `skinny_linear`.
    """
    cdef int8_packing packing
    dtype = _dtype_of("weight", weight)
    _check_matrix("weight", weight, dtype)
    cdef int chosen = _path_index(path)
    cdef int count = _thread_count(threads)
    packing.outputs, packing.depth = weight.shape
    cdef int64_t steps = (packing.depth + INT8_STEP - 1) // INT8_STEP
    values = torch.empty((packing.outputs, steps * INT8_STEP), dtype=torch.int8)
    scales, left_out, norms = torch.empty((3, packing.outputs)).unbind()
    packing.weight = <char *><uintptr_t>weight.data_ptr()
    packing.weight_stride = weight.stride(0)
    packing.dtype = _dtypes[dtype]
    packing.values = <int8_t *><uintptr_t>values.data_ptr()
    packing.scales = <float *><uintptr_t>scales.data_ptr()
    packing.left_out = <float *><uintptr_t>left_out.data_ptr()
    packing.norms = <float *><uintptr_t>norms.data_ptr()
    packing.next_chunk = 0
    with nogil:
        _paths[chosen].pack_int8(&packing, count)
    return values, scales, left_out, norms


def int8_linear(x, values, scales, bias=None, *, path=None, threads=None):
    """`x @ weight.T + bias` for the weight that `pack_int8` has rounded, made for 1 to 64 rows of x.

    A row of x is rounded to 14 bits, one scale per row; products are summed as integers, and the result is
    rounded once to x's dtype. A row of x gives the same bits whatever rows stand beside it and however many
    threads work. A row of x that is not finite gives NaN. Not differentiable.

    Args:
        x: [..., depth], float32, bfloat16 or float16, any strides; depth may be less than the values' by
            what fills them up.
        values, scales: what `pack_int8` returned.
        bias: [outputs] of x's dtype, or None.
        path, threads: as for `skinny_linear`.

    Raises:
        As `skinny_linear`.
    """
    cdef linear_problem problem
    for name, part, dtype in (
        ("values", values, torch.int8),
        ("scales", scales, torch.float32),
    ):
        _check_plain(name, part, dtype)
        if not part.is_contiguous():
            raise ValueError(f"{name}: expected adjacent elements, got strides {part.stride()}")
    if values.dim() != 2 or values.size(1) % INT8_STEP:
        raise ValueError(f"values: expected rows of a multiple of {INT8_STEP}, got {list(values.shape)}")
    _check_shape("scales", scales, (values.size(0),))
    dtype = _dtype_of("x", x)
    padding = values.size(1) - x.size(-1) if x.dim() else -1
    depth = values.size(1) - (padding if 0 <= padding < INT8_STEP else 0)
    _check_rows(x, dtype, values.size(0), depth, bias)
    _read_values(&problem, values, scales)
    problem.depth = depth
    problem.weight_dtype = SKINNY_ROUNDED
    return _solve(&problem, x, bias, _path_index(path), _thread_count(threads))


cdef int _read_values(linear_problem *problem, object values, object scales) except -1:
    problem.outputs, problem.depth = values.shape
    problem.weight = <char *><uintptr_t>values.data_ptr()
    problem.weight_stride = values.stride(0)
    problem.weight_dtype = SKINNY_INT8
    problem.scales = <char *><uintptr_t>scales.data_ptr()
    problem.scale_dtype = _dtypes[scales.dtype]
    return 0


def pack_int4(weight, column_weights=None, *, path=None, threads=None):
    """Round a matrix to four bits: a weight becomes `scale * level`, one of 16 levels that lie closer near zero, as
    those of NF4 (QLoRA, section 3), and, of those tried for each 32 neighbours of a row, the scale in float16 that
    leaves out the least square.

    Args:
        weight, path, threads: as for `skinny_linear`.
        column_weights: float32 [depth], at least 0: how much what is left out of a column counts, which is most
            useful as the mean square of what it is multiplied by; None: as much as of any other.

    Returns:
        uint8 [blocks of 16 outputs, bytes], as `int4_linear` reads them; linear_kernels.h says how.

    Raises:
        As `skinny_linear`.
    """
    cdef int4_packing packing
    dtype = _dtype_of("weight", weight)
    _check_matrix("weight", weight, dtype)
    cdef int chosen = _path_index(path)
    cdef int count = _thread_count(threads)
    packing.outputs, packing.depth = weight.shape
    packing.dtype, packing.next_block = _dtypes[dtype], 0
    groups = skinny_parts(packing.depth, INT4_GROUP)
    blocks = torch.empty((skinny_parts(packing.outputs, INT4_ROWS), groups * INT4_BLOCK_BYTES), dtype=torch.uint8)
    packing.weight = <char *><uintptr_t>weight.data_ptr()
    packing.weight_stride = weight.stride(0)
    packing.column_weights = NULL
    if column_weights is not None:
        _check_plain("column_weights", column_weights, torch.float32)
        _check_shape("column_weights", column_weights, (packing.depth,))
        column_weights = column_weights.contiguous()
        packing.column_weights = <float *><uintptr_t>column_weights.data_ptr()
    packing.blocks = <char *><uintptr_t>blocks.data_ptr()
    with nogil:
        _paths[chosen].pack_int4(&packing, count)
    return blocks


cdef int _read_blocks(linear_problem *problem, object blocks, int64_t outputs, int64_t depth) except -1:
    groups = skinny_parts(depth, INT4_GROUP)
    _check_plain("blocks", blocks, torch.uint8)
    _check_shape("blocks", blocks, (skinny_parts(outputs, INT4_ROWS), groups * INT4_BLOCK_BYTES))
    if not blocks.is_contiguous():
        raise ValueError(f"blocks: expected adjacent elements, got strides {blocks.stride()}")
    problem.outputs, problem.depth = outputs, depth
    problem.weight = <char *><uintptr_t>blocks.data_ptr()
    problem.weight_stride, problem.weight_dtype = groups * INT4_ROW_BYTES, SKINNY_INT4
    problem.scales, problem.scale_dtype = NULL, SKINNY_FLOAT32
    return 0


def int4_linear(x, blocks, outputs, bias=None, *, path=None, threads=None):
    """`x @ weight.T + bias` for the weight that `pack_int4` has rounded, made for 1 to 64 rows of x.

    A row of x is rounded to eight bits, with a scale for each group of neighbours; products within a group are
    summed as integers, groups in float32, and the result is rounded once to x's dtype. A row of x gives the
    same bits whatever rows stand beside it and however many threads work. What is not finite gives what is not,
    in its own row or output. Not differentiable.

    Args:
        x: [..., depth], float32, bfloat16 or float16, any strides.
        blocks: what `pack_int4` returned.
        outputs: the weight's rows.
        bias: [outputs] of x's dtype, or None.
        path, threads: as for `skinny_linear`.

    Raises:
        As `skinny_linear`.
    """
    cdef linear_problem problem
    dtype = _dtype_of("x", x)
    depth = x.size(-1) if x.dim() else 0
    _check_rows(x, dtype, outputs, depth, bias)
    _read_blocks(&problem, blocks, outputs, depth)
    return _solve(&problem, x, bias, _path_index(path), _thread_count(threads))


def scaled_linear(x, values, scales, bias=None, *, path=None, threads=None):
    """`x @ (scales[:, None] * values).T + bias`, made for 1 to 64 rows of x, which are not rounded.

    Sums of products with the values are those of `skinny_linear`, taken in float32, scaled and rounded
    once to x's dtype. A row of x gives the same bits whatever rows stand beside it and however many
    threads work. Not differentiable. The arguments have to fit; `routed_scaled` checks that they do.

    Args:
        x: [..., depth], float32, bfloat16 or float16, any strides.
        values: int8 [outputs, depth], adjacent columns.
        scales: float32, bfloat16 or float16, as many as there are outputs, contiguous.
        bias: [outputs] of x's dtype, or None.
        path, threads: as for `skinny_linear`.
    """
    cdef linear_problem problem
    _read_values(&problem, values, scales)
    return _solve(&problem, x, bias, _path_index(path), _thread_count(threads))


cdef object _plain_linear = torch._C._nn.linear


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
    if depth == 0 or x.size(-1) != depth or not 0 < x.numel() <= _most_rows() * depth:
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
        return kernel_linear(input, weight, bias)
    return _plain_linear(input, weight, bias)


def routed_scaled(x, values, scales, dtype, bias=None):
    """`scaled_linear` with its defaults inside a scope of this thread, of a few rows of plain tensors
    that nobody records or transforms; None otherwise.

    Args:
        x, values, bias: as for `scaled_linear`.
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
    return scaled_linear(x, values, scales, bias)


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
