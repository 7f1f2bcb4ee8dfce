# Operators of single elements.

cdef dict _element_kinds = {
    "copy": ELEMENT_COPY, "neg": ELEMENT_NEG, "mul": ELEMENT_MUL, "add": ELEMENT_ADD
}

# More elements are worth PyTorch's threads.
cdef int64_t _most_elements = 1 << 15


cdef class RepeatedElements:
    """A copy, the negative, a product or a sum of tensors that stay where they are, computed anew by
    every call.

    Args:
        kind: "copy", "neg", "mul" or "add".
        inputs: one or two dense CPU tensors of one dtype, which broadcast to the result's shape.
        out: which every call writes to; it does not overlap others, but may be one of them.

    Raises:
        TypeError: an input is no tensor.
        ValueError: they are not of this kind, have more than four axes or many elements, or the
            elements of the last axis are not adjacent.
    """

    cdef element_problem _problem
    cdef object _kept

    def __init__(self, str kind, inputs, out):
        cdef int tensor, axis
        if not all([isinstance(x, torch.Tensor) for x in inputs]):
            raise TypeError(f"{kind}: expected tensors, got {[type(x).__name__ for x in inputs]}")
        given = [x.expand(out.shape) for x in inputs]
        tensors = (given[0], given[len(given) - 1], out)
        fits = PATHS and out.dtype in _dtypes and 0 < out.numel() <= _most_elements
        for x in tensors:
            fits = fits and _is_plain(x, out.dtype) and x.dim() <= 4 and (x.dim() and x.stride(-1) == 1)
        if not fits:
            raise ValueError(f"{kind}: expected small tensors of one dtype with adjacent elements")
        self._kept = tensors
        self._problem.kind, self._problem.dtype = _element_kinds[kind], _dtypes[out.dtype]
        self._problem.a = <char *><uintptr_t>tensors[0].data_ptr()
        self._problem.b = <char *><uintptr_t>tensors[1].data_ptr()
        self._problem.out = <char *><uintptr_t>out.data_ptr()
        lacking = 4 - out.dim()
        for axis in range(4):
            self._problem.shape[axis] = out.size(axis - lacking) if axis >= lacking else 1
            for tensor in range(3):
                stride = tensors[tensor].stride(axis - lacking) if axis >= lacking else 0
                self._problem.strides[tensor][axis] = stride

    def __call__(self):
        _paths[_path_count - 1].elements(&self._problem)
