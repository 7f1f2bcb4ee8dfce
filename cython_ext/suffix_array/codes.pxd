# Texts as codes: token id + 1, and 0 after every document, in big-endian bytes of a fixed width.
from common.types cimport int32_t, int64_t, uint8_t, uint32_t


cdef struct Text:
    const uint8_t* codes  # [length * width]
    int64_t length
    int32_t width


cdef inline uint32_t code_at(const Text* text, int64_t position) noexcept nogil:
    """The code at a position; 0, the end of a document, outside the text."""
    cdef const uint8_t* byte
    if not 0 <= position < text.length:
        return 0
    byte = text.codes + position * text.width
    if text.width == 3:
        return <uint32_t>byte[0] << 16 | <uint32_t>byte[1] << 8 | byte[2]
    if text.width == 2:
        return <uint32_t>byte[0] << 8 | byte[1]
    if text.width == 4:
        return (
            <uint32_t>byte[0] << 24 | <uint32_t>byte[1] << 16 | <uint32_t>byte[2] << 8 | byte[3]
        )
    return byte[0]
