# Linear layers with weights in eight bits, for few input rows: a quarter of the bytes of float32.

INT8_GROUP = GROUP

# Elements that kernels may read behind the last factor or scale.
_BEHIND = INT8_BLOCK


cdef int _check_parts(object values, object factors, object scales) except -1:
    """Raise unless the three are what `pack_int8` returns."""
    _check_plain("values", values, torch.int8)
    _check_plain("factors", factors, torch.bfloat16)
    _check_plain("scales", scales, torch.float32)
    if values.dim() != 2 or values.size(1) % GROUP or not values.is_contiguous():
        raise ValueError(f"values: expected adjacent rows of groups, got {list(values.shape)}")
    for name, part, count in (
        ("factors", factors, values.numel() // GROUP + _BEHIND),
        ("scales", scales, values.size(0) + _BEHIND),
    ):
        _check_shape(name, part, (count,))
        if not part.is_contiguous():
            raise ValueError(f"{name}: expected adjacent elements")
    return 0


def pack_int8(weight, *, path=None, threads=None):
    """Round a matrix to eight bits, GROUP (32) weights of a row to a scale of their own.

    A weight becomes `scale[row] * factor[row, group] * value`, with values from -127 to 127. The scale is
    the row's greatest magnitude over 127, the factor (bfloat16, rounded up) the group's share of it.

    Args:
        weight: [outputs, depth], float32, bfloat16 or float16, adjacent columns.
        path, threads: as for `skinny_linear`.

    Returns:
        values: int8 [outputs, groups * 32]; the last group is padded with zeros.
        factors: bfloat16 [outputs * groups + 16], the last 16 unused.
        scales: float32 [outputs + 16], the last 16 unused; NaN for rows that are not finite.
        left_out: float32 [outputs], the Euclidean norm of what rounding takes from a row, rounded up.
        norms: float32 [outputs], of the rows themselves, rounded up.

    Raises:
        TypeError, ValueError: as for `skinny_linear`.
    """
    cdef int8_packing packing
    _check_weight(weight)
    cdef int chosen = _path_index(path)
    cdef int count = _thread_count(threads)
    packing.outputs, packing.depth = weight.shape
    cdef int64_t groups = (packing.depth + GROUP - 1) // GROUP
    values = torch.empty((packing.outputs, groups * GROUP), dtype=torch.int8)
    factors = torch.zeros(packing.outputs * groups + _BEHIND, dtype=torch.bfloat16)
    scales = torch.zeros(packing.outputs + _BEHIND)
    left_out, norms = torch.empty(packing.outputs), torch.empty(packing.outputs)
    packing.weight = <char *><uintptr_t>weight.data_ptr()
    packing.weight_stride = weight.stride(0)
    packing.dtype = _dtypes[weight.dtype]
    packing.values = <int8_t *><uintptr_t>values.data_ptr()
    packing.factors = <uint16_t *><uintptr_t>factors.data_ptr()
    packing.row_scales = <float *><uintptr_t>scales.data_ptr()
    packing.left_out = <float *><uintptr_t>left_out.data_ptr()
    packing.norms = <float *><uintptr_t>norms.data_ptr()
    packing.next_chunk = 0
    with nogil:
        _paths[chosen].pack_int8(&packing, count)
    return values, factors, scales, left_out, norms


def int8_linear(x, values, factors, scales, bias=None, *, path=None, threads=None):
    """`x @ weight.T + bias` for the weight that `pack_int8` has rounded, made for 1 to 64 rows of x.

    A row of x is rounded to 16 bits, one scale per row; products of a group are summed as integers and
    groups in float32, and the result is rounded once to x's dtype. A row of x gives the same bits
    whatever rows stand beside it and however many threads work. A row of x that is not finite gives
    NaN. Not differentiable.

    Args:
        x: [..., depth], float32, bfloat16 or float16, any strides; depth may be less than the values' by
            what pads their last group.
        values, factors, scales: what `pack_int8` returned.
        bias: [outputs] of x's dtype, or None.
        path, threads: as for `skinny_linear`.

    Raises:
        TypeError, ValueError: as for `skinny_linear`.
    """
    cdef linear_problem problem
    cdef int chosen = _path_index(path)
    _check_parts(values, factors, scales)
    dtype = getattr(x, "dtype", None)
    if dtype not in _dtypes:
        raise TypeError(f"x: expected float32, bfloat16 or float16, got {dtype}")
    _check_plain("x", x, dtype)
    if x.dim() < 1 or not -GROUP < x.size(-1) - values.size(1) <= 0:
        raise ValueError(f"x: expected shape [..., {values.size(1)}], got {list(x.shape)}")
    if bias is not None:
        _check_plain("bias", bias, dtype)
        _check_shape("bias", bias, (values.size(0),))
    _read_grouped(&problem, values, factors, scales, x.size(-1))
    return _solve(&problem, x, bias, None, chosen, _thread_count(threads))


cdef int _read_grouped(
    linear_problem *problem, object values, object factors, object scales, int64_t depth
) except -1:
    problem.outputs, problem.weight_stride = values.shape
    problem.depth = depth
    problem.weight = <char *><uintptr_t>values.data_ptr()
    problem.weight_dtype = SKINNY_GROUPED
    problem.factors = <char *><uintptr_t>factors.data_ptr()
    problem.scales = <char *><uintptr_t>scales.data_ptr()
    problem.scale_dtype = SKINNY_FLOAT32
    return 0


def scaled_linear(x, values, scales, bias=None, *, path=None, threads=None):
    """`x @ (scales[:, None] * values).T + bias`, made for 1 to 64 rows of x, which are not rounded.

    Sums of products with the values are those of `skinny_linear`, taken in float32, scaled and rounded
    once to x's dtype. A row of x gives the same bits whatever rows stand beside it and however many
    threads work. Not differentiable.

    Args:
        x: [..., depth], float32, bfloat16 or float16, any strides.
        values: int8 [outputs, depth], adjacent columns.
        scales: float32, bfloat16 or float16 [outputs], contiguous.
        bias: [outputs] of x's dtype, or None.
        path, threads: as for `skinny_linear`.

    Raises:
        TypeError, ValueError: as for `skinny_linear`.
    """
    cdef int chosen = _path_index(path)
    for name, tensor in (("x", x), ("scales", scales)):
        dtype = getattr(tensor, "dtype", None)
        if dtype not in _dtypes:
            raise TypeError(f"{name}: expected float32, bfloat16 or float16, got {dtype}")
        _check_plain(name, tensor, dtype)
    _check_matrix("values", values, torch.int8)
    _check_rows(x, values, bias, None, x.dtype)
    _check_shape("scales", scales, (values.size(0),))
    if not scales.is_contiguous():
        raise ValueError(f"scales: expected adjacent elements, got strides {list(scales.stride())}")
    return _multiply_scaled(x, values, scales, bias, chosen, _thread_count(threads))


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
    return _multiply_scaled(x, values, scales, bias, _path_index(None), _get_num_threads())


cdef object _multiply_scaled(object x, object values, object scales, object bias, int path, int threads):
    """`scaled_linear` on arguments known to be valid."""
    cdef linear_problem problem
    problem.outputs, problem.depth = values.shape
    problem.weight = <char *><uintptr_t>values.data_ptr()
    problem.weight_stride = values.stride(0)
    problem.weight_dtype = SKINNY_INT8
    problem.factors = NULL
    problem.scales = <char *><uintptr_t>scales.data_ptr()
    problem.scale_dtype = _dtypes[scales.dtype]
    return _solve(&problem, x, bias, None, path, threads)
