# Linear layers of a few input rows. PyTorch's `linear` is made for one row or for hundreds; between
# them its time grows with the rows although the memory traffic, which bounds it, does not.

MAX_ROWS = ROUTED_ROWS


cdef tuple _output_shape(object x, int64_t outputs):
    cdef tuple shape = tuple(x.shape)
    return shape[: len(shape) - 1] + (outputs,)


cdef object _new_output(object x, int64_t outputs):
    # `new_empty` takes three times as long.
    return _empty(_output_shape(x, outputs), dtype=x.dtype, device=_cpu)


cdef int _check_shape(str name, object tensor, object shape) except -1:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")
    return 0


cdef int _check_weight(object weight) except -1:
    dtype = getattr(weight, "dtype", None)
    if dtype not in _dtypes:
        raise TypeError(f"weight: expected float32, bfloat16 or float16, got {dtype}")
    return _check_matrix("weight", weight, dtype)


cdef int _check_matrix(str name, object matrix, object dtype) except -1:
    _check_plain(name, matrix, dtype)
    if matrix.dim() != 2 or matrix.stride(1) != 1:
        raise ValueError(
            f"{name}: expected a matrix with adjacent columns, got shape {list(matrix.shape)} "
            f"with strides {list(matrix.stride())}"
        )
    return 0


cdef int _check_linear(object x, object weight, object bias, object out) except -1:
    _check_weight(weight)
    return _check_rows(x, weight, bias, out, weight.dtype)


cdef int _check_rows(object x, object weight, object bias, object out, object dtype) except -1:
    _check_plain("x", x, dtype)
    if x.dim() < 1 or x.size(-1) != weight.size(1):
        raise ValueError(f"x: expected shape [..., {weight.size(1)}], got {list(x.shape)}")
    if bias is not None:
        _check_plain("bias", bias, dtype)
        _check_shape("bias", bias, (weight.size(0),))
    if out is not None:
        _check_plain("out", out, dtype)
        _check_shape("out", out, _output_shape(x, weight.size(0)))
        if not out.is_contiguous():
            raise ValueError(f"out: expected a contiguous tensor, got strides {list(out.stride())}")
    return 0


cdef object _as_rows(object x, int64_t depth, linear_problem *problem):
    """Describe x as rows of adjacent elements; returns the tensor that owns them."""
    if not x.is_contiguous():
        x = x.reshape(-1, depth)
        if x.stride(1) != 1:
            x = x.contiguous()
        problem.x_stride = x.stride(0)
    else:
        problem.x_stride = depth
    problem.rows = <int64_t>x.numel() // depth
    problem.x = <char *><uintptr_t>x.data_ptr()
    return x


cdef object _multiply(object x, object weight, object bias, object out, int path, int threads):
    """`skinny_linear` on arguments known to be valid."""
    cdef linear_problem problem
    _read_dense(&problem, weight)
    return _solve(&problem, x, bias, out, path, threads)


cdef int _read_dense(linear_problem *problem, object weight) except -1:
    problem.outputs, problem.depth = weight.shape
    problem.weight = <char *><uintptr_t>weight.data_ptr()
    problem.weight_stride = weight.stride()[0]
    problem.weight_dtype = _dtypes[weight.dtype]
    problem.factors = NULL
    problem.scales = NULL
    problem.scale_dtype = SKINNY_FLOAT32
    return 0


cdef object _solve(linear_problem *problem, object x, object bias, object out, int path, int threads):
    """The product of x with the weights of a problem, plus bias."""
    cdef int failed
    if out is None:
        out = _new_output(x, problem.outputs)
    if problem.depth == 0:
        return out.zero_() if bias is None else out.copy_(bias)
    rows = _as_rows(x, problem.depth, problem)  # which owns what the problem points to
    if bias is not None:
        bias = bias.contiguous()
    problem.bias = NULL if bias is None else <char *><uintptr_t>bias.data_ptr()
    problem.dtype = _dtypes[out.dtype]
    problem.y = <char *><uintptr_t>out.data_ptr()
    problem.y_stride = problem.outputs
    with nogil:
        failed = _paths[path].linear(problem, threads)
    if failed:
        raise MemoryError(f"no memory to pack {problem.rows} rows of {problem.depth}")
    return out


def skinny_linear(x, weight, bias=None, out=None, *, path=None, threads=None):
    """`x @ weight.T + bias`, made for 1 to 64 rows of x; more rows read the weights again per 64.

    Sums are float32 fused multiply-adds, rounded once to the dtype. A row of x gives the same bits
    whatever rows stand beside it and however many threads work; they differ between paths. Not
    differentiable.

    Args:
        x: [..., in_features], any strides.
        weight: [out_features, in_features], float32, bfloat16 or float16, adjacent columns.
        bias: [out_features] or None.
        out: contiguous [..., out_features] to write to, overlapping no input; None: a new tensor.
        path: one of `PATHS`, the instruction sets this CPU has; None: the last of them.
        threads: at most so many; None: `torch.get_num_threads()`.

    Raises:
        TypeError: an argument is not a tensor of the weight's dtype, or that is not supported.
        ValueError: shapes do not fit, a tensor is not dense on the CPU or requires grad, no such
            path, or `threads` is not positive.
        RuntimeError: this CPU has none of them, here and in all other kernels but norms.
    """
    _check_linear(x, weight, bias, out)
    return _multiply(x, weight, bias, out, _path_index(path), _thread_count(threads))


def kernel_linear(x, weight, bias):
    """`skinny_linear` with its defaults, on arguments that `routed_linear` has looked at."""
    return _multiply(x, weight, bias, None, _path_index(None), _get_num_threads())


def compact_linear(x, weight, bias=None, *, path=None, threads=None):
    """`skinny_linear` of float32 rows with a bfloat16 weight: the bits of the same weight in float32,
    from half the bytes.

    Args:
        x: float32 [..., in_features], any strides.
        weight: bfloat16 [out_features, in_features], adjacent columns.
        bias: float32 [out_features] or None.
        path, threads: as for `skinny_linear`.

    Raises:
        TypeError, ValueError: as for `skinny_linear`.
    """
    _check_plain("weight", weight, torch.bfloat16)
    _check_weight(weight)
    _check_rows(x, weight, bias, None, torch.float32)
    return _multiply(x, weight, bias, None, _path_index(path), _thread_count(threads))


cdef object _plain_linear = torch._C._nn.linear
cdef dict _methods = {}
cdef int64_t _least_routed = 0
cdef object _choose = None


cdef bint _is_recorded(object x, object weight, object bias):
    """Whether autograd would record the product."""
    return _is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )


cdef bint _can_route(object x, object weight, object bias):
    """Whether the product may be computed here: few rows of plain tensors that fit, and nobody who
    records or transforms it.
    """
    return _is_routed_weight(weight) and _are_few_rows(x, weight, bias, weight.dtype)


cdef bint _is_routed_weight(object weight):
    dtype = getattr(weight, "dtype", None)
    return (
        dtype in _dtypes
        and _is_plain(weight, dtype)
        and weight.dim() == 2
        and weight.is_contiguous()
        and weight.numel() >= _least_routed
    )


cdef bint _are_few_rows(object x, object weight, object bias, object dtype):
    """Whether x and bias are plain tensors that fit a matrix, few rows, and nobody records or transforms
    their product.
    """
    if not _is_plain(x, dtype) or x.dim() < 1:
        return False
    outputs, depth = weight.shape
    if depth == 0 or x.size(-1) != depth or not 0 < x.numel() <= ROUTED_ROWS * depth:
        return False
    if bias is not None and (not _is_plain(bias, dtype) or bias.shape != (outputs,)):
        return False
    return not (_is_recorded(x, weight, bias) or _is_transformed())


def routed_linear(input, weight, bias=None):
    """`torch.nn.functional.linear`; inside a scope of this thread, by the method chosen for the
    weight, where the arguments allow it.
    """
    if thread_depth == 0 or not PATHS or not _can_route(input, weight, bias):
        return _plain_linear(input, weight, bias)
    return _method_of(weight)(input, weight, bias)


cdef object _method_of(object weight):
    """What computes a weight's products, chosen when its like is first met."""
    key = (weight.shape, weight.dtype, _get_num_threads())
    method = _methods.get(key)
    if method is None:
        method = _methods[key] = _choose(weight)
    return method


def set_chooser(choose, least_elements=0):
    """Let `choose(weight)` name the function (x, weight, bias) for weights of a new shape, dtype or
    number of threads; what was chosen before is forgotten. Weights of fewer elements than
    `least_elements` are left to PyTorch.
    """
    global _choose, _least_routed
    _choose = choose
    _least_routed = least_elements
    _methods.clear()


def route_depth():
    """How many scopes this thread is in."""
    return thread_depth


def set_route_depth(int depth):
    """Let this thread be in so many; in one or more its `routed_linear` chooses."""
    global thread_depth
    thread_depth = depth


def in_route():
    """Whether this thread is inside a scope."""
    return thread_depth > 0
