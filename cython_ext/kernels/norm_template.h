/* Root mean square norms for one instruction set; see norm_kernel.h. */

#define NORM_SIDE 4
#define NORM_LEVELS 4
#define NORM_MOST_LANES 16

/* A product that is added must be rounded first. */
#if defined(__clang__)
#define ROUND_PRODUCTS
#pragma STDC FP_CONTRACT OFF
#else
#define ROUND_PRODUCTS __attribute__((optimize("fp-contract=off")))
#endif

static ALWAYS_INLINE float norm_read(const char *from, int64_t i, int dtype) {
    if (dtype == SKINNY_FLOAT32) return ((const float *)from)[i];
    const uint16_t half = ((const uint16_t *)from)[i];
    return dtype == SKINNY_BFLOAT16 ? skinny_float_of_bf16(half) : skinny_float_of_f16(half);
}

static ALWAYS_INLINE void norm_write(char *to, int64_t i, float value, int dtype) {
    if (dtype == SKINNY_FLOAT32)
        ((float *)to)[i] = value;
    else
        ((uint16_t *)to)[i] = dtype == SKINNY_BFLOAT16 ? skinny_bf16_of(value) : skinny_f16_of(value);
}

static ALWAYS_INLINE float norm_round(float value, int dtype) {
    if (dtype == SKINNY_FLOAT32) return value;
    return dtype == SKINNY_BFLOAT16 ? skinny_float_of_bf16(skinny_bf16_of(value))
                                    : skinny_float_of_f16(skinny_f16_of(value));
}

static int norm_level_bits(int64_t steps) {
    int bits = 0;
    while (((int64_t)1 << bits) < steps) bits++;
    return bits / NORM_LEVELS > 4 ? bits / NORM_LEVELS : 4;
}

ROUND_PRODUCTS static ALWAYS_INLINE float norm_square(const char *x, int64_t i, const int dtype) {
    const float value = norm_read(x, i, dtype);
    return value * value;
}

ROUND_PRODUCTS static ALWAYS_INLINE float norm_squares(const char *x, int64_t depth, const int lanes,
                                                       const int dtype) {
    float sums[NORM_LEVELS][NORM_SIDE * NORM_MOST_LANES] = {{0}};
    const int side = NORM_SIDE * lanes;
    const int64_t vectors = depth / lanes, steps = vectors / NORM_SIDE;
    const int bits = norm_level_bits(steps);
    const int64_t mask = ((int64_t)1 << bits) - 1;
    float total = 0;
    for (int64_t i = 0; i < steps; i++) {
        for (int k = 0; k < side; k++) sums[0][k] += norm_square(x, i * side + k, dtype);
        for (int level = 1; level < NORM_LEVELS && !((i + 1) & mask << (level - 1) * bits); level++)
            for (int k = 0; k < side; k++) {
                sums[level][k] += sums[level - 1][k];
                sums[level - 1][k] = 0;
            }
    }
    for (int level = 1; level < NORM_LEVELS; level++)
        for (int k = 0; k < side; k++) sums[0][k] += sums[level][k];
    for (int64_t i = steps * side; i < vectors * lanes; i++) sums[0][i % lanes] += norm_square(x, i, dtype);
    for (int k = lanes; k < side; k++) sums[0][k % lanes] += sums[0][k];
    for (int64_t i = vectors * lanes; i < depth; i++) total += norm_square(x, i, dtype);
    for (int k = 0; k < lanes; k++) total += sums[0][k];
    return total;
}

ROUND_PRODUCTS static ALWAYS_INLINE void norm_row(const norm_problem *p, const char *x, char *y, const int dtype) {
    const float squares = p->lanes == 4   ? norm_squares(x, p->depth, 4, dtype)
                          : p->lanes == 8 ? norm_squares(x, p->depth, 8, dtype)
                                          : norm_squares(x, p->depth, 16, dtype);
    const float factor = 1.0f / sqrtf(squares / (float)p->depth + p->epsilon);
    for (int64_t i = 0; i < p->depth; i++) {
        const float w = norm_read(p->weight, i, dtype), scaled = norm_read(x, i, dtype) * factor;
        const float value = p->rounded ? norm_round(scaled, dtype) : scaled;
        norm_write(y, i, value * (p->shifted ? 1.0f + w : w), dtype);
    }
}

ROUND_PRODUCTS static ALWAYS_INLINE void norm_rows(const norm_problem *p, int64_t first, int64_t end,
                                                   const int dtype) {
    const int64_t bytes = p->depth * skinny_item_bytes(dtype);
    for (int64_t row = first; row < end; row++) norm_row(p, p->x + row * bytes, p->y + row * bytes, dtype);
}

ROUND_PRODUCTS static void norm_chunk(void *of, int64_t chunk, int thread) {
    const norm_problem *p = of;
    const int64_t rows = norm_chunk_rows(p), first = chunk * rows, end = skinny_min(first + rows, p->rows);
    (void)thread;
    if (p->dtype == SKINNY_FLOAT32)
        norm_rows(p, first, end, SKINNY_FLOAT32);
    else if (p->dtype == SKINNY_BFLOAT16)
        norm_rows(p, first, end, SKINNY_BFLOAT16);
    else
        norm_rows(p, first, end, SKINNY_FLOAT16);
}

static work_step norm_step(norm_problem *p) {
    return (work_step){.work = norm_chunk, .of = p, .chunks = skinny_parts(p->rows, norm_chunk_rows(p))};
}
