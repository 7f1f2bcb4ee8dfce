/* Rows of numbers rounded to integers, one scale a row, for one instruction set; see lanes.h. */

/* INT8_STEP elements from the k-th as float32, zeros behind the last. */
static ALWAYS_INLINE void read_step(float *to, const char *from, int64_t k, int64_t depth, int dtype) {
    const int64_t bytes = skinny_item_bytes(dtype);
    char part[INT8_STEP * 4] = {0};
    const char *step = from + k * bytes;
    if (k + INT8_STEP > depth) {
        memcpy(part, step, (depth - k) * bytes);
        step = part;
    }
    for (int i = 0; i < INT8_STEP; i += LANES) STORE(to + i, read_lanes(step + i * bytes, dtype));
}

/* The bits of the greatest magnitude of at most INT8_STEP numbers; a NaN counts as more than infinity. */
static ALWAYS_INLINE uint32_t greatest_bits(const float *step, const int count) {
    uint32_t bits[INT8_STEP], greatest = 0;
    memcpy(bits, step, count * sizeof(*bits));
    for (int i = 0; i < count; i++) {
        const uint32_t magnitude = bits[i] & 0x7fffffffu;
        greatest = magnitude > greatest ? magnitude : greatest;
    }
    return greatest;
}

static float greatest_of(const char *from, int64_t depth, int dtype) {
    float step[INT8_STEP];
    uint32_t greatest = 0;
    for (int64_t k = 0; k < depth; k += INT8_STEP) {
        read_step(step, from, k, depth, dtype);
        const uint32_t here = greatest_bits(step, INT8_STEP);
        greatest = here > greatest ? here : greatest;
    }
    return skinny_float_of(greatest);
}

/* What a row is divided by, so that its greatest magnitude becomes `most`: 0 for zeros, NaN for a row that
 * is not finite. */
static float scale_of(float greatest, float most) {
    return greatest < INT8_LEAST ? 0 : greatest < INFINITY ? greatest / most : NAN;
}

/* Numbers, at most INT8_STEP, times a factor, rounded to nearest integers of less than 2^15 in magnitude. Adding
 * 1.5 * 2^23 leaves the integer in the lowest bits. */
static ALWAYS_INLINE void round_step(int16_t *to, const float *step, float factor, const int count) {
    float shifted[INT8_STEP];
    uint32_t bits[INT8_STEP];
    for (int i = 0; i < count; i++) shifted[i] = step[i] * factor + 0x1.8p23f;
    memcpy(bits, shifted, count * sizeof(*bits));
    for (int i = 0; i < count; i++) to[i] = (int16_t)bits[i];
}
