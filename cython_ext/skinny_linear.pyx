"""Linear layers for a few input rows, which read their weights from memory once.

PyTorch's `linear` is made for one row or for hundreds; between them its time grows with the rows
although the memory traffic, which bounds it, does not.
"""

import ctypes
import sys

import torch

from libc.stdint cimport int64_t, uintptr_t

cdef extern from "openmp_runtime.h" nogil:
    void openmp_use_gomp(uintptr_t parallel)
    void openmp_use_kmp(uintptr_t fork, uintptr_t thread, uintptr_t push)

cdef extern from "route_depth.h" nogil:
    int route_depth

cdef extern from "skinny_kernels.h" nogil:
    enum:
        SKINNY_FLOAT32
        SKINNY_BFLOAT16
        SKINNY_FLOAT16
        PASS_ROWS

    ctypedef struct skinny_problem:
        char *x
        char *weight
        char *bias
        char *y
        int64_t rows, depth, outputs
        int64_t x_stride, weight_stride, y_stride
        int dtype

    ctypedef int (*skinny_entry)(const skinny_problem *, int) noexcept

    ctypedef struct skinny_path:
        const char *name
        skinny_entry run

    int skinny_paths(skinny_path *paths)


cdef skinny_path _paths[4]
cdef int _path_count = skinny_paths(_paths)
cdef dict _dtypes = {
    torch.float32: SKINNY_FLOAT32,
    torch.bfloat16: SKINNY_BFLOAT16,
    torch.float16: SKINNY_FLOAT16,
}
cdef object _strided = torch.strided
cdef object _get_num_threads = torch.get_num_threads

MAX_ROWS = PASS_ROWS
PATHS = tuple(_paths[i].name.decode() for i in range(_path_count))


def _borrow_openmp():
    """Find the OpenMP runtime in this process and return its interface's name, or None."""
    library = ctypes.WinDLL("libiomp5md.dll") if sys.platform == "win32" else ctypes.CDLL(None)

    def address(name):
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value

    if hasattr(library, "GOMP_parallel"):
        openmp_use_gomp(address("GOMP_parallel"))
        return "gomp"
    if hasattr(library, "__kmpc_fork_call"):
        openmp_use_kmp(
            address("__kmpc_fork_call"),
            address("__kmpc_global_thread_num"),
            address("__kmpc_push_num_threads"),
        )
        return "kmp"
    return None


OPENMP = _borrow_openmp()


cdef int _path_index(object path) except -1:
    if path is None:
        return _path_count - 1
    if path not in PATHS:
        raise ValueError(f"path: expected one of {PATHS}, got {path!r}")
    return PATHS.index(path)


cdef int _check_plain(str name, object tensor, object dtype) except -1:
    """Raise unless `tensor` is dense, on the CPU and of the dtype."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if not tensor.is_cpu or tensor.layout is not _strided:
        raise ValueError(
            f"{name}: expected a dense CPU tensor, got {tensor.layout} on {tensor.device}"
        )
    if tensor.is_neg():
        raise ValueError(f"{name}: expected values in memory, got a view with the negative bit set")
    if tensor.dtype is not dtype:
        raise TypeError(f"{name}: expected {dtype} like the weight, got {tensor.dtype}")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: requires grad, and skinny_linear is not differentiable")
    return 0


cdef object _output_shape(object x, int64_t outputs):
    return x.shape[: x.dim() - 1] + (outputs,)


cdef int _check_shape(str name, object tensor, object shape) except -1:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")
    return 0


cdef int _check(object x, object weight, object bias, object out) except -1:
    dtype = getattr(weight, "dtype", None)
    if dtype not in _dtypes:
        raise TypeError(f"weight: expected float32, bfloat16 or float16, got {dtype}")
    _check_plain("weight", weight, dtype)
    _check_plain("x", x, dtype)
    if weight.dim() != 2 or weight.stride(1) != 1:
        raise ValueError(
            f"weight: expected a matrix with adjacent columns, got shape {list(weight.shape)} "
            f"with strides {list(weight.stride())}"
        )
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


cdef object _as_rows(object x, int64_t depth, skinny_problem *problem):
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
    cdef skinny_problem problem
    cdef int failed
    problem.outputs, problem.depth = weight.shape
    problem.dtype = _dtypes[weight.dtype]
    if out is None:
        out = x.new_empty(_output_shape(x, problem.outputs))
    if problem.depth == 0:
        return out.zero_() if bias is None else out.copy_(bias)
    rows = _as_rows(x, problem.depth, &problem)
    adjacent_bias = None if bias is None else bias.contiguous()
    problem.weight = <char *><uintptr_t>weight.data_ptr()
    problem.weight_stride = weight.stride(0)
    problem.bias = NULL if bias is None else <char *><uintptr_t>adjacent_bias.data_ptr()
    problem.y = <char *><uintptr_t>out.data_ptr()
    problem.y_stride = problem.outputs
    with nogil:
        failed = _paths[path].run(&problem, threads)
    if failed:
        raise MemoryError(f"no memory to pack {problem.rows} rows of {problem.depth}")
    return out


def skinny_linear(x, weight, bias=None, out=None, *, path=None, threads=None):
    """`x @ weight.T + bias`, made for 1 to 64 rows of x; more rows read the weights again per 64.

    Sums are float32 fused multiply-adds (separate roundings on the "portable" path), rounded once
    to the dtype. A row of x gives the same bits whatever rows stand beside it and however many
    threads work; they differ between paths. Not differentiable.

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
    """
    _check(x, weight, bias, out)
    if threads is None:
        threads = _get_num_threads()
    if threads < 1:
        raise ValueError(f"threads: expected a positive number, got {threads}")
    return _multiply(x, weight, bias, out, _path_index(path), threads)


def kernel_linear(x, weight, bias):
    """`skinny_linear` with its defaults, on arguments that `routed_linear` has looked at."""
    return _multiply(x, weight, bias, None, _path_count - 1, _get_num_threads())


cdef object _plain_linear = torch._C._nn.linear
cdef object _tensor = torch.Tensor
cdef object _parameter = torch.nn.Parameter
cdef object _is_grad_enabled = torch.is_grad_enabled
cdef object _is_autocast_enabled = torch.is_autocast_enabled
cdef object _function_transform = torch._C._functorch.peek_interpreter_stack
cdef dict _methods = {}
cdef object _choose = None


cdef bint _is_plain(object tensor, object dtype):
    """Whether nothing but the tensor's own memory decides its values."""
    kind = type(tensor)
    return (
        (kind is _tensor or kind is _parameter)
        and tensor.dtype is dtype
        and tensor.is_cpu
        and tensor.layout is _strided
        and not tensor.is_neg()
    )


cdef bint _is_recorded(object x, object weight, object bias):
    """Whether autograd would record the product."""
    return _is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )


cdef bint _can_route(object x, object weight, object bias):
    """Whether the product may be computed here: few rows of plain tensors that fit, and nobody who
    records or transforms it.
    """
    dtype = getattr(weight, "dtype", None)
    if dtype not in _dtypes or not _is_plain(weight, dtype) or not _is_plain(x, dtype):
        return False
    if weight.dim() != 2 or not weight.is_contiguous() or x.dim() < 1:
        return False
    outputs, depth = weight.shape
    if depth == 0 or x.size(-1) != depth or not 0 < x.numel() <= PASS_ROWS * depth:
        return False
    if bias is not None and (not _is_plain(bias, dtype) or bias.shape != (outputs,)):
        return False
    return not (
        _is_recorded(x, weight, bias)
        or _is_autocast_enabled("cpu")
        or _function_transform() is not None
    )


def routed_linear(input, weight, bias=None):
    """`torch.nn.functional.linear`; inside a scope of this thread, by the method chosen for the
    weight, where the arguments allow it.
    """
    if route_depth == 0 or not _can_route(input, weight, bias):
        return _plain_linear(input, weight, bias)
    key = (weight.shape, weight.dtype, _get_num_threads())
    method = _methods.get(key)
    if method is None:
        method = _methods[key] = _choose(weight)
    return method(input, weight, bias)


def set_chooser(choose):
    """Let `choose(weight)` name the function (x, weight, bias) for weights of a new shape, dtype or
    number of threads; what was chosen before is forgotten.
    """
    global _choose
    _choose = choose
    _methods.clear()


def enter_route():
    """Let this thread's `routed_linear` choose; nests."""
    global route_depth
    route_depth += 1


def leave_route():
    """Undo one `enter_route` of this thread."""
    global route_depth
    route_depth -= 1
