# Integer widths of the structures, named once.
from libc.stdint cimport int8_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

ctypedef int32_t token_t  # a token id, 0 .. 2^31 - 1
ctypedef int32_t state_t  # an index into a structure's node or state arrays
