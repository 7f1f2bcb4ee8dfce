cdef extern from "common/prefetch.h":
    void prefetch "hfra_prefetch"(const void* address) noexcept nogil
