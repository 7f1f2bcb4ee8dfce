# Root mean square norms in one operation, where transformers' modules take eight.

NORM_LANES = (4, 8, 16)

# More elements are worth PyTorch's threads.
cdef int64_t _most_normed = 1 << 18


cdef bint _can_norm(object x, object weight):
    dtype = getattr(weight, "dtype", None)
    if dtype not in _dtypes or not _is_plain(weight, dtype) or not _is_plain(x, dtype):
        return False
    if weight.dim() != 1 or weight.numel() == 0 or not weight.is_contiguous():
        return False
    if x.dim() < 1 or x.size(-1) != weight.numel() or not 0 < x.numel() <= _most_normed:
        return False
    if x.stride(-1) != 1:  # then PyTorch adds in another order
        return False
    return not (_is_recorded(x, weight, None) or _is_transformed())


def fused_norm(x, weight, float epsilon, bint shifted, bint rounded, int lanes):
    """`x / sqrt(mean(x ** 2) + epsilon) * weight` of the rows of x, in the roundings of PyTorch's
    operators one after another; squares are added as PyTorch does with vectors of `lanes` floats.

    Args:
        x: [..., depth] on the CPU, a row's elements adjacent.
        weight: [depth] of the same dtype.
        epsilon: what is added to the mean.
        shifted: whether `1 + weight` multiplies, in float32.
        rounded: whether the quotient is rounded to the dtype before.
        lanes: one of `NORM_LANES`.

    Returns:
        A tensor like x; None where the arguments are not of this kind, or autograd, autocast or a
        function transform would have to see the operators.
    """
    if not _can_norm(x, weight):
        return None
    y = _empty_like(x)
    # A dense tensor's rows lie one after another, in whatever order of its dimensions.
    if not x.is_contiguous() and y.stride() != x.stride():
        x = x.contiguous()
        y = _empty_like(x)
    RepeatedNorm(x, weight, epsilon, shifted, rounded, lanes, y)()
    return y


cdef class RepeatedNorm(RepeatedOperator):
    """:func:`fused_norm` of tensors that stay where they are, computed anew by every call.

    Args:
        x, weight, epsilon, shifted, rounded, lanes: as for :func:`fused_norm`.
        y: of x's strides, which every call writes to.
    """

    cdef norm_problem _problem
    cdef object _kept

    def __init__(self, x, weight, float epsilon, bint shifted, bint rounded, int lanes, y):
        self._kept = x, weight, y
        self._problem.x = <char *><uintptr_t>x.data_ptr()
        self._problem.weight = <char *><uintptr_t>weight.data_ptr()
        self._problem.y = <char *><uintptr_t>y.data_ptr()
        self._problem.depth = weight.numel()
        self._problem.rows = <int64_t>x.numel() // self._problem.depth
        self._problem.dtype = _dtypes[x.dtype]
        self._problem.epsilon, self._problem.lanes = epsilon, lanes
        self._problem.shifted, self._problem.rounded = shifted, rounded
        self._operation.kind, self._operation.problem = OPERATION_NORM, &self._problem

    def __call__(self):
        with nogil:
            if _path_count:
                run_alone(_paths[_path_count - 1].norm_step(&self._problem))
            else:
                plain_norm(&self._problem)
