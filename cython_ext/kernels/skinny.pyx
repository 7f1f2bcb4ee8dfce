"""Linear layers and attention for a few rows of dense CPU tensors: weights, keys and values are read
from memory once for all rows.
"""

import ctypes

import torch

from libc.math cimport sqrt
from libc.stdint cimport int64_t, uintptr_t
from libc.stdlib cimport calloc, free

cdef extern from "openmp_runtime.h" nogil:
    void openmp_use(const uintptr_t *addresses, int count)

cdef extern from *:
    """
    static __thread int thread_depth = 0, thread_verifies = 0;
    """
    int thread_depth  # how many scopes of reroute the running thread is in
    bint thread_verifies  # whether it verifies drafts there

cdef extern from "program.h" nogil:
    enum:
        SKINNY_FLOAT32
        SKINNY_BFLOAT16
        SKINNY_FLOAT16
        SKINNY_INT8
        SKINNY_ROUNDED
        SKINNY_INT4
        INT8_STEP
        INT4_GROUP
        INT4_ROWS
        INT4_ROW_BYTES
        INT4_BLOCK_BYTES
        MASK_NONE
        MASK_BOOL
        MASK_ADDED
        WIDTH_MULTIPLE
        ROUTED_ROWS
        MAX_PATHS
        MAX_TOGETHER
        ELEMENT_COPY
        ELEMENT_NEG
        ELEMENT_MUL
        ELEMENT_ADD
        ELEMENT_TABLE
        PASS_ROWS
        OPERATION_LINEARS
        OPERATION_ATTENTION
        OPERATION_NORM
        OPERATION_ELEMENTS

    ctypedef struct linear_problem:
        char *x
        char *weight
        char *bias
        char *y
        int64_t rows, depth, outputs
        int64_t x_stride, weight_stride, y_stride
        int dtype
        int weight_dtype
        const char *scales
        int scale_dtype

    ctypedef struct weight_packing:
        const char *weight
        int64_t outputs, depth, weight_stride
        int dtype
        char *values
        float *scales
        float *left_out
        float *norms
        const float *column_weights

    ctypedef struct attention_problem:
        const char *query
        const char *key
        const char *value
        const char *mask
        char *out
        int64_t batch, groups, heads, queries, slots, depth, width
        int64_t query_strides[3]
        int64_t key_strides[3]
        int64_t value_strides[3]
        int64_t mask_strides[3]
        float scale
        int dtype
        int mask_kind

    ctypedef struct norm_problem:
        const char *x
        const char *weight
        char *y
        int64_t rows, depth
        float epsilon
        int dtype
        int lanes
        int shifted
        int rounded

    ctypedef struct element_problem:
        const char *a
        const char *b
        char *out
        int64_t shape[4]
        int64_t strides[3][4]
        int dtype
        int kind
        const int64_t *places
        int placed

    ctypedef struct work_step:
        pass

    ctypedef struct work_progress:
        pass

    ctypedef struct kernel_path:
        const char *name
        work_step (*norm_step)(norm_problem *) noexcept nogil
        work_step (*element_step)(element_problem *) noexcept nogil
        work_step (*int8_step)(weight_packing *) noexcept nogil
        work_step (*int4_step)(weight_packing *) noexcept nogil

    ctypedef struct operation:
        int kind
        int count
        void *problem

    ctypedef struct program:
        operation *operations
        int count

    int64_t skinny_item_bytes(int dtype)
    int64_t skinny_parts(int64_t, int64_t)
    int kernel_paths(kernel_path *paths)
    void plain_norm(norm_problem *)
    void run_alone(work_step)
    void run_steps(const work_step *, work_progress *, int count, int threads)
    int run_linears(const linear_problem *, int count, const kernel_path *, int threads)
    int run_attention(const attention_problem *, const kernel_path *, int threads)
    int run_program(program *, const kernel_path *, int threads)
    void free_program(program *)


cdef kernel_path _paths[MAX_PATHS]
cdef int _path_count = kernel_paths(_paths)

# The instruction sets there are kernels for here; without one PyTorch computes everything.
PATHS = tuple(_paths[i].name.decode() for i in range(_path_count))

cdef dict _dtypes = {
    torch.float32: SKINNY_FLOAT32,
    torch.bfloat16: SKINNY_BFLOAT16,
    torch.float16: SKINNY_FLOAT16,
}
cdef object _strided = torch.strided
cdef object _get_num_threads = torch.get_num_threads
# How many modes of PyTorch's, such as FLOP counters, see this thread's operators.
cdef object _dispatch_modes = torch._C._len_torch_dispatch_stack
cdef object _function_modes = torch._C._len_torch_function_stack
cdef object _empty_like = torch.empty_like
cdef object _empty = torch.empty
cdef object _cpu = torch.device("cpu")
cdef object _tensor = torch.Tensor
cdef object _parameter = torch.nn.Parameter
cdef object _is_grad_enabled = torch.is_grad_enabled
cdef object _is_autocast_enabled = torch.is_autocast_enabled
cdef object _function_transform = torch._C._functorch.peek_interpreter_stack


# GNU's entry point, which LLVM's and Intel's runtimes offer too on Linux, and LLVM's own.
cdef tuple _openmp_functions = (
    ("GOMP_parallel",),
    ("__kmpc_fork_call", "__kmpc_global_thread_num", "__kmpc_push_num_threads"),
)


cdef int _share_openmp() except -1:
    """Let this module's kernels run on the threads of PyTorch's OpenMP, if there is one."""
    cdef uintptr_t addresses[3]
    library = ctypes.CDLL(None)
    for functions in _openmp_functions:
        if hasattr(library, functions[0]):
            for i, function in enumerate(functions):
                addresses[i] = ctypes.cast(getattr(library, function), ctypes.c_void_p).value
            openmp_use(addresses, len(functions))
            break
    return 0


cdef class RepeatedOperator:
    """An operator whose tensors stay where they are, computed anew by every call."""

    cdef operation _operation


cdef int _path_index(object path) except -1:
    """The place of an instruction set in `PATHS`; None: the last one, the fastest."""
    if not PATHS:
        raise RuntimeError("kernels: expected a CPU with AVX2 or NEON, got another one")
    return <int>len(PATHS) - 1 if path is None else PATHS.index(path)


cdef int _thread_count(object threads) except -1:
    """`threads`, or as many as PyTorch uses."""
    if threads is None:
        return _get_num_threads()
    if threads < 1:
        raise ValueError(f"threads: expected a positive number, got {threads}")
    return threads


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


cdef bint _is_transformed():
    """Whether autocast or a function transform changes what operators do."""
    return _is_autocast_enabled("cpu") or _function_transform() is not None


_share_openmp()

include "linear.pxi"
include "attention.pxi"
include "norm.pxi"
include "elements.pxi"
include "program.pxi"
