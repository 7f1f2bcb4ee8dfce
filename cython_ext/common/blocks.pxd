# Blocks of memory, or a MemoryError.
from libc.stdlib cimport realloc


cdef inline void* resized(void* block, size_t size) except NULL nogil:
    """A block with room for `size` bytes in place of another, or of NULL; that one stays where there is none."""
    cdef void* found = realloc(block, max(size, <size_t>1))
    if found == NULL:
        with gil:
            raise MemoryError(f"no memory for {size} bytes")
    return found


cdef inline void* owned(list owner, size_t size) except NULL:
    """A block of zeros that lives as long as the owner."""
    cdef unsigned char[::1] block = bytearray(max(size, <size_t>1))
    owner.append(block)
    return &block[0]
