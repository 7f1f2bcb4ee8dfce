# A hint that a cache line will be read soon. Never faults; does nothing where there is no such hint.
cdef extern from *:
    """
    #if defined(__GNUC__) || defined(__clang__)
    #define hfra_prefetch(address) __builtin_prefetch(address)
    #elif defined(_M_X64) || defined(_M_IX86)
    #include <intrin.h>
    #define hfra_prefetch(address) _mm_prefetch((const char*)(address), _MM_HINT_T0)
    #else
    #define hfra_prefetch(address) ((void)(address))
    #endif
    """
    void prefetch "hfra_prefetch"(const void* address) noexcept nogil
