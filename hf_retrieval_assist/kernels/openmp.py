"""The OpenMP runtime that PyTorch has loaded, for the compiled kernels to share."""

from __future__ import annotations

import ctypes
import sys

# GNU's entry point, which LLVM's and Intel's runtimes offer too on Linux, and LLVM's own.
_INTERFACES = {
    "gomp": ("GOMP_parallel",),
    "kmp": ("__kmpc_fork_call", "__kmpc_global_thread_num", "__kmpc_push_num_threads"),
}


def find_openmp() -> tuple[str | None, list[int]]:
    """The interface that this process has, "gomp" or "kmp", and the addresses of its functions;
    None without one.
    """
    if sys.platform == "win32":
        library = ctypes.WinDLL("libiomp5md.dll")
    else:
        library = ctypes.CDLL(None)
    for name, functions in _INTERFACES.items():
        if hasattr(library, functions[0]):
            found = [getattr(library, function) for function in functions]
            return name, [ctypes.cast(entry, ctypes.c_void_p).value or 0 for entry in found]
    return None, []
