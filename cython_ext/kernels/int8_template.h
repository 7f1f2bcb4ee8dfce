/* Weights in eight bits for one instruction set; see linear_kernels.h. A row of x is rounded to 16 bits
 * once, so that the products of a group are exact integers: twice as many to an instruction as in
 * float32. Besides what tile_template.h asks for, the instruction set defines
 *
 *   int8_group, load_group(p)    GROUP weights, widened to 16 bits
 *   group_dot(w, p)              LANES sums of products with GROUP 16-bit numbers, as float32
 */

/* GROUP elements from the k-th as float32, zeros behind the last. */
static ALWAYS_INLINE void read_group(float *to, const char *from, int64_t k, int64_t depth, int dtype) {
    const int64_t bytes = skinny_item_bytes(dtype);
    char part[GROUP * 4] = {0};
    const char *group = from + k * bytes;
    if (k + GROUP > depth) {
        memcpy(part, group, (depth - k) * bytes);
        group = part;
    }
    for (int i = 0; i < GROUP; i += LANES) STORE(to + i, read_lanes(group + i * bytes, dtype));
}

/* The bits of the greatest magnitude; a NaN counts as more than infinity. */
static ALWAYS_INLINE uint32_t greatest_bits(const float *group, uint32_t greatest) {
    uint32_t bits[GROUP];
    memcpy(bits, group, sizeof(bits));
    for (int i = 0; i < GROUP; i++) {
        const uint32_t magnitude = bits[i] & 0x7fffffffu;
        greatest = magnitude > greatest ? magnitude : greatest;
    }
    return greatest;
}

/* group * factor, rounded to nearest integers, of less than 2^15 in magnitude. Adding 1.5 * 2^23 leaves
 * the integer in the lowest bits. */
static ALWAYS_INLINE void round_group(int16_t *to, const float *group, float factor) {
    float shifted[GROUP];
    uint32_t bits[GROUP];
    for (int i = 0; i < GROUP; i++) shifted[i] = group[i] * factor + 0x1.8p23f;
    memcpy(bits, shifted, sizeof(bits));
    for (int i = 0; i < GROUP; i++) to[i] = (int16_t)bits[i];
}

/* One row of x in 16 bits, GROUP of them every `stride` bytes. Returns their scale: NaN for a row that
 * is not finite. */
static float pack_int16(char *to, int64_t stride, const char *from, int64_t depth, int dtype) {
    float group[GROUP];
    uint32_t bits = 0;
    for (int64_t k = 0; k < depth; k += GROUP) {
        read_group(group, from, k, depth, dtype);
        bits = greatest_bits(group, bits);
    }
    const float greatest = skinny_float_of(bits);
    const int usable = greatest >= INT8_LEAST && greatest < INFINITY;
    for (int64_t k = 0; k < depth; k += GROUP, to += stride) {
        read_group(group, from, k, depth, dtype);
        if (usable)
            round_group((int16_t *)to, group, INT16_MOST / greatest);
        else
            memset(to, 0, GROUP * 2);
    }
    return usable ? greatest / INT16_MOST : greatest < INT8_LEAST ? 0.0f : NAN;
}

/* Panels of x as [groups][its rows][GROUP]. */
static void pack_int16_panels(char *panels, const linear_pass *pass) {
    const linear_problem *p = pass->problem;
    const int64_t row_bytes = p->x_stride * skinny_item_bytes(p->dtype);
    for (int64_t i = 0; i < pass->panel_count; i++) {
        const int64_t start = linear_panel_start(pass, i), end = linear_panel_start(pass, i + 1);
        char *panel = panels + start * pass->packed_bytes;
        for (int64_t row = start; row < end; row++)
            pass->x_scales[row] =
                pack_int16(panel + (row - start) * GROUP * 2, (end - start) * GROUP * 2,
                           p->x + row * row_bytes, p->depth, p->dtype);
    }
}

/* TILE_ROWS weight rows times one panel; into t.sums. Rows are short, and hardware follows the streams by
 * itself: fetching in software what lies ahead made it slower. */
static ALWAYS_INLINE void int8_tile(const int rows, skinny_tile t, const char *const *factors) {
    const int64_t groups = skinny_parts(t.depth, GROUP);
    float factor[TILE_ROWS][INT8_BLOCK];
    VEC acc[PANEL_ROWS][TILE_ROWS];
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < TILE_ROWS; o++) acc[r][o] = ZERO();
    for (int64_t start = 0; start < groups; start += INT8_BLOCK) {
        const int64_t count = skinny_min(INT8_BLOCK, groups - start);
        for (int o = 0; o < TILE_ROWS; o++)
            for (int i = 0; i < INT8_BLOCK; i += LANES)
                STORE(factor[o] + i, load_bf16(factors[o] + (start + i) * 2));
        for (int64_t g = 0; g < count; g++, t.panel += rows * GROUP * 2) {
            const int64_t k = (start + g) * GROUP;
            for (int o = 0; o < TILE_ROWS; o++) {
                const int8_group w = load_group(t.weight[o] + k);
                const VEC scale = SET1(factor[o][g]);
                for (int r = 0; r < rows; r++)
                    acc[r][o] = FMA(group_dot(w, t.panel + r * GROUP * 2), scale, acc[r][o]);
            }
        }
    }
    store_sums(rows, &t, acc);
}

#define INT8_CASE(rows) \
    case rows: int8_tile(rows, t, factors); break;

static void int8_tile_of(int64_t rows, skinny_tile t, const char *const *factors) {
    switch (rows) {
        CASES(PANEL_ROWS, INT8_CASE)
    }
}

/* One row of weights in eight bits. Its scale stands for the greatest weight of the row; a group's
 * factor, of bfloat16, rounded up, for the group's share of it. Returns the squared norm of what is
 * left out, and that of the row. */
static void pack_int8_row(const int8_packing *p, int64_t row, double *left_out, double *whole) {
    const char *from = p->weight + row * p->weight_stride * skinny_item_bytes(p->dtype);
    const int64_t groups = skinny_parts(p->depth, GROUP);
    float group[GROUP];
    int16_t rounded[GROUP];
    uint32_t bits = 0;
    for (int64_t g = 0; g < groups; g++) {
        read_group(group, from, g * GROUP, p->depth, p->dtype);
        bits = greatest_bits(group, bits);
    }
    const float greatest = skinny_float_of(bits);
    const int usable = greatest >= INT8_LEAST && greatest < INFINITY;
    const float row_scale = usable ? greatest / INT8_MOST : greatest < INT8_LEAST ? 0.0f : NAN;
    *left_out = *whole = 0;
    for (int64_t g = 0; g < groups; g++) {
        int8_t *to = p->values + (row * groups + g) * GROUP;
        read_group(group, from, g * GROUP, p->depth, p->dtype);
        const float share = usable ? skinny_float_of(greatest_bits(group, 0)) / greatest : 0;
        const uint32_t factor = (skinny_bits_of(share) + 0xffff) >> 16;
        const float scale = skinny_float_of(factor << 16) * row_scale;
        const int kept = scale >= INT8_LEAST;
        round_group(rounded, group, kept ? 1 / scale : 0);
        p->factors[row * groups + g] = (uint16_t)factor;
        double rest = 0, all = 0;
        for (int i = 0; i < GROUP; i++) {
            const int16_t value = kept ? rounded[i] : 0;
            const double part = (double)group[i] - (double)scale * value;
            to[i] = (int8_t)value;
            rest += part * part;
            all += (double)group[i] * group[i];
        }
        *left_out += rest;
        *whole += all;
    }
    p->row_scales[row] = row_scale;
}

/* What one thread does: chunks of rows until none is left. Norms are rounded up. */
static void pack_int8_work(void *shared) {
    int8_packing *p = shared;
    int64_t first;
    while ((first = FETCH_ADD(&p->next_chunk) * CHUNK_ROWS) < p->outputs)
        for (int64_t row = first; row < skinny_min(first + CHUNK_ROWS, p->outputs); row++) {
            double left_out, whole;
            pack_int8_row(p, row, &left_out, &whole);
            p->left_out[row] = (float)(sqrt(left_out) * (1 + 0x1p-20));
            p->norms[row] = (float)(sqrt(whole) * (1 + 0x1p-20));
        }
}

static void pack_int8(int8_packing *packing, int threads) {
    openmp_parallel(pack_int8_work, packing, threads);
}
