# What several layers make of one input, in one pass of the threads.

cdef object _linear = torch.nn.Linear
cdef object _linear_forward = torch.nn.Linear.forward
cdef tuple _own_hooks = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)
cdef tuple _global_hooks = tuple(
    [getattr(torch.nn.modules.module, f"_global{name}") for name in _own_hooks]
)


cdef bint _has_no_hooks(object module):
    """Whether calling a module is calling its class's `forward`."""
    cdef dict state = module.__dict__
    for name in _own_hooks:
        if state.get(name, True):
            return False
    return "forward" not in state


cpdef bint are_unobserved(modules):
    """Whether nobody sees modules being called, by hooks or a `forward` of their own."""
    for hooks in _global_hooks:
        if hooks:
            return False
    for module in modules:
        if not _has_no_hooks(module):
            return False
    return True


cdef bint _read_layer(linear_problem *problem, object x, object weight, object stand_in) except -1:
    """Describe what the kernel reads of a layer's weight; whether the kernel is what serves it.

    Args:
        stand_in: for the weight; None: nothing.
    """
    parts = None
    if stand_in is not None:
        reads = getattr(stand_in, "kernel_reads", None)
        if reads is None:
            return False
        parts = reads(x)
    if parts is not None:
        values, factors, scales = parts
        if factors is not None:
            _read_grouped(problem, values, factors, scales, x.size(-1))
            return -GROUP < problem.depth - problem.weight_stride <= 0
        _read_dense(problem, values)
    elif weight.dtype is x.dtype and _is_routed_weight(weight):
        if _method_of(weight) is not kernel_linear:
            return False
        _read_dense(problem, weight)
    else:
        return False
    return problem.depth == x.size(-1)


cdef bint _can_multiply(object x):
    """Whether x is a few plain rows that nobody transforms."""
    dtype = getattr(x, "dtype", None)
    return (
        dtype in _dtypes
        and _is_plain(x, dtype)
        and x.dim() > 0
        and 0 < x.numel() <= ROUTED_ROWS * <int64_t>x.size(-1)
        and not _is_transformed()
    )


def linear_together(x, layers, stand_ins):
    """`[layer(x) for layer in layers]` by the kernel, in one pass, inside a scope of this thread.

    Args:
        x: [..., depth].
        layers: one to `MOST_TOGETHER` of them.
        stand_ins: what stands for weights, by their identity. It may say by `kernel_reads(x)` what the
            kernel reads in a weight's place: (values, factors, scales) as `pack_int8` returns them,
            (values, None, None) of a matrix; None: the weight itself.

    Returns:
        The products; None where one of them would not be the kernel's, where kinds of weights differ,
        or where autograd, hooks, autocast or a function transform would have to see the layers.
    """
    cdef linear_problem problems[MOST_TOGETHER]
    cdef int i, count = len(layers)
    if thread_depth == 0 or count > MOST_TOGETHER or not _can_multiply(x) or not are_unobserved(layers):
        return None
    if _linear.forward is not _linear_forward:
        return None
    dtype = x.dtype
    rows = _as_rows(x, x.size(-1), &problems[0])
    products, biases = [], []
    for i, layer in enumerate(layers):
        if type(layer) is not _linear:
            return None
        weight, bias = layer._parameters["weight"], layer._parameters["bias"]
        if weight is None or _is_recorded(x, weight, bias):
            return None
        if i:
            problems[i] = problems[0]
            problems[i - 1].next = &problems[i]
        if not _read_layer(&problems[i], x, weight, stand_ins.get(id(weight))):
            return None
        if problems[i].weight_dtype != problems[0].weight_dtype:
            return None
        if bias is not None and not (
            _is_plain(bias, dtype) and bias.shape == (problems[i].outputs,)
        ):
            return None
        products.append(_new_output(x, problems[i].outputs))
        biases.append(_aim(&problems[i], bias, products[i]))
    problems[count - 1].next = NULL
    _run(&problems[0], _path_count - 1, _get_num_threads())
    return products
