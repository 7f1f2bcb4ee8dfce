# Numbers of a Mersenne Twister (Matsumoto and Nishimura 1998), as torch makes them on a CPU.
from libc.math cimport log, log1p
from libc.stdint cimport uint32_t, uint64_t


cdef inline uint32_t tempered(uint32_t y) noexcept nogil:
    """What a word of the state gives."""
    y ^= y >> 11
    y ^= (y << 7) & <uint32_t>0x9D2C5680
    y ^= (y << 15) & <uint32_t>0xEFC60000
    return y ^ (y >> 18)


cdef inline float gain_of(uint32_t high, uint32_t low) noexcept nogil:
    """-log of the exponentially distributed number that 64 bits become."""
    cdef uint64_t bits = (<uint64_t>high << 32 | low) & ((<uint64_t>1 << 53) - 1)
    return <float>-log(-log1p(-<double>max(bits, 1) * 2.0**-53))
