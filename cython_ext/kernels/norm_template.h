/* Root mean square norms for one instruction set; see norm_kernel.h. */

#define NORM_SIDE 4
#define NORM_LEVELS 4
#define NORM_MOST_LANES 16

/* A product that is added must be rounded first. */
#if defined(__clang__) || defined(_MSC_VER)
#define ROUND_PRODUCTS
#pragma STDC FP_CONTRACT OFF
#else
#define ROUND_PRODUCTS __attribute__((optimize("fp-contract=off")))
#endif

static ALWAYS_INLINE float norm_read(const char *from, int64_t i, int dtype) {
    uint16_t half;
    float value;
    if (dtype == SKINNY_FLOAT32) {
        memcpy(&value, from + 4 * i, 4);
        return value;
    }
    memcpy(&half, from + 2 * i, 2);
    return dtype == SKINNY_BFLOAT16 ? skinny_float_of_bf16(half) : skinny_float_of_f16(half);
}

static ALWAYS_INLINE void norm_write(char *to, int64_t i, float value, int dtype) {
    uint16_t half;
    if (dtype == SKINNY_FLOAT32) {
        memcpy(to + 4 * i, &value, 4);
        return;
    }
    half = dtype == SKINNY_BFLOAT16 ? skinny_bf16_of(value) : skinny_f16_of(value);
    memcpy(to + 2 * i, &half, 2);
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

ROUND_PRODUCTS static ALWAYS_INLINE float norm_squares(const float *v, int64_t depth, const int lanes) {
    float sums[NORM_LEVELS][NORM_SIDE * NORM_MOST_LANES] = {{0}};
    const int side = NORM_SIDE * lanes;
    const int64_t vectors = depth / lanes, steps = vectors / NORM_SIDE;
    const int bits = norm_level_bits(steps);
    const int64_t mask = ((int64_t)1 << bits) - 1;
    float total = 0;
    for (int64_t i = 0; i < steps; i++) {
        for (int k = 0; k < side; k++) sums[0][k] += v[i * side + k] * v[i * side + k];
        for (int level = 1; level < NORM_LEVELS && !((i + 1) & mask << (level - 1) * bits); level++)
            for (int k = 0; k < side; k++) {
                sums[level][k] += sums[level - 1][k];
                sums[level - 1][k] = 0;
            }
    }
    for (int level = 1; level < NORM_LEVELS; level++)
        for (int k = 0; k < side; k++) sums[0][k] += sums[level][k];
    for (int64_t i = steps * side; i < vectors * lanes; i++) sums[0][i % lanes] += v[i] * v[i];
    for (int k = lanes; k < side; k++) sums[0][k % lanes] += sums[0][k];
    for (int64_t i = vectors * lanes; i < depth; i++) total += v[i] * v[i];
    for (int k = 0; k < lanes; k++) total += sums[0][k];
    return total;
}

ROUND_PRODUCTS static ALWAYS_INLINE void norm_row(const norm_problem *p, const char *x, char *y, float *v,
                                                  const int dtype) {
    for (int64_t i = 0; i < p->depth; i++) v[i] = norm_read(x, i, dtype);
    const float squares = p->lanes == 4   ? norm_squares(v, p->depth, 4)
                          : p->lanes == 8 ? norm_squares(v, p->depth, 8)
                                          : norm_squares(v, p->depth, 16);
    const float factor = 1.0f / sqrtf(squares / (float)p->depth + p->epsilon);
    for (int64_t i = 0; i < p->depth; i++) {
        const float w = norm_read(p->weight, i, dtype), scaled = v[i] * factor;
        const float value = p->rounded ? norm_round(scaled, dtype) : scaled;
        norm_write(y, i, value * (p->shifted ? 1.0f + w : w), dtype);
    }
}

ROUND_PRODUCTS static ALWAYS_INLINE void norm_rows(const norm_problem *p, float *v, const int dtype) {
    const int64_t bytes = p->depth * skinny_item_bytes(dtype);
    for (int64_t row = 0; row < p->rows; row++) norm_row(p, p->x + row * bytes, p->y + row * bytes, v, dtype);
}

/* Returns 0, or -1 when memory ran out. */
ROUND_PRODUCTS static int norm(const norm_problem *p) {
    float *v = malloc(p->depth * sizeof(float));
    if (!v) return -1;
    if (p->dtype == SKINNY_FLOAT32)
        norm_rows(p, v, SKINNY_FLOAT32);
    else if (p->dtype == SKINNY_BFLOAT16)
        norm_rows(p, v, SKINNY_BFLOAT16);
    else
        norm_rows(p, v, SKINNY_FLOAT16);
    free(v);
    return 0;
}
