# Checks of arrays that come from Python.
from common.types cimport int64_t, token_t


cdef inline int check_ids(const token_t[::1] token_ids) except -1:
    """ValueError for a negative id."""
    cdef Py_ssize_t i
    for i in range(token_ids.shape[0]):
        if token_ids[i] < 0:
            raise ValueError(f"token_ids: expected 0 or more, got {token_ids[i]}")
    return 0


# Arrays hold the parts of several texts or trees, one behind another.
cdef inline int check_offsets(const int64_t[::1] offsets, Py_ssize_t parts, Py_ssize_t n) except -1:
    """ValueError unless they rise from 0 to n, one for each part and one for the end."""
    cdef Py_ssize_t i
    if offsets.shape[0] != parts + 1:
        raise ValueError(f"offsets: expected {parts + 1} of them, got {offsets.shape[0]}")
    if offsets[0] != 0 or offsets[parts] != n:
        raise ValueError(f"offsets: expected 0 to {n}, got {offsets[0]} to {offsets[parts]}")
    for i in range(parts):
        if offsets[i + 1] < offsets[i]:
            raise ValueError(f"offsets: expected rising ones, got {offsets[i + 1]} behind {offsets[i]}")
    return 0
