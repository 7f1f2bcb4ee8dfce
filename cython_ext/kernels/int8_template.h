/* Weights in eight bits for one instruction set; see linear_kernels.h. A row of x is rounded to 14 bits
 * once, so that products are exact integers: twice as many to an instruction as in float32. Besides what
 * tile_template.h asks for, the instruction set defines
 *
 *   int8_weights, load_weights(p)         INT8_STEP weights, widened to 16 bits
 *   int8_sums, no_sums()                  LANES sums
 *   add_products(sums, w, x)              adds products with INT8_STEP numbers of 16 bits
 *   to_floats(sums)                       as VEC
 */

/* Weights of a row whose products the lanes of a vector can sum up. */
#define SUMMED_DEPTH (SUMMED * LANES)

/* Elements of a row from the k-th as float32, at most INT8_STEP, zeros behind the last. */
static ALWAYS_INLINE void read_step(float *to, const char *from, int64_t k, int64_t depth, int dtype, const int count) {
    const int64_t bytes = skinny_item_bytes(dtype);
    char part[INT8_STEP * 4] = {0};
    const char *step = from + k * bytes;
    if (k + count > depth) {
        memcpy(part, step, (depth - k) * bytes);
        step = part;
    }
    for (int i = 0; i < count; i += LANES) STORE(to + i, read_lanes(step + i * bytes, dtype));
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
        read_step(step, from, k, depth, dtype, INT8_STEP);
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

/* One row of x in integers, INT8_STEP of them every `stride` bytes. Returns their scale. */
static float pack_int8_x(char *to, int64_t stride, const char *from, int64_t depth, int dtype) {
    const float greatest = greatest_of(from, depth, dtype), scale = scale_of(greatest, X_MOST);
    float step[INT8_STEP];
    int16_t rounded[INT8_STEP] = {0};
    for (int64_t k = 0; k < depth; k += INT8_STEP, to += stride) {
        read_step(step, from, k, depth, dtype, INT8_STEP);
        if (scale > 0) round_step(rounded, step, X_MOST / greatest, INT8_STEP);
        memcpy(to, rounded, sizeof(rounded));
    }
    return scale;
}

/* TILE_ROWS weight rows times one panel; into t->sums. */
static ALWAYS_INLINE void int8_tile(const int rows, const skinny_tile *t) {
    const int64_t depth = t->depth;
    const char *weight[TILE_ROWS], *panel = t->panel, *fetch = t->fetch;
    VEC acc[PANEL_ROWS][TILE_ROWS];
    UNROLL for (int o = 0; o < TILE_ROWS; o++) weight[o] = weight_row(t, o);
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < TILE_ROWS; o++) acc[r][o] = ZERO();
    for (int64_t k = 0; k < depth;) {
        const int64_t end = k + skinny_min(SUMMED_DEPTH, depth - k);
        int8_sums sums[PANEL_ROWS][TILE_ROWS];
        for (int r = 0; r < rows; r++)
            for (int o = 0; o < TILE_ROWS; o++) sums[r][o] = no_sums();
        for (; k < end; k += INT8_STEP, panel += rows * X_STEP_BYTES, fetch += t->fetch_step) {
            fetch_step(t, fetch);
            for (int o = 0; o < TILE_ROWS; o++) {
                const int8_weights w = load_weights(weight[o] + k);
                for (int r = 0; r < rows; r++) sums[r][o] = add_products(sums[r][o], w, panel + r * X_STEP_BYTES);
            }
        }
        for (int r = 0; r < rows; r++)
            for (int o = 0; o < TILE_ROWS; o++) acc[r][o] = ADD(acc[r][o], to_floats(sums[r][o]));
    }
    store_sums(rows, t, acc);
}

#define INT8_CASE(many) \
    if (are_rows(rows, many)) int8_tile(many, t);

static void int8_tile_of(int64_t rows, const skinny_tile *t) { CASES(PANEL_ROWS, INT8_CASE) }

/* One row of weights in eight bits. Norms are rounded up. */
static void pack_int8_row(const weight_packing *p, int64_t row) {
    const char *from = p->weight + row * p->weight_stride * skinny_item_bytes(p->dtype);
    int8_t *to = (int8_t *)p->values + row * skinny_parts(p->depth, INT8_STEP) * INT8_STEP;
    const float scale = scale_of(greatest_of(from, p->depth, p->dtype), INT8_MOST);
    float step[INT8_STEP];
    int16_t rounded[INT8_STEP] = {0};
    double left_out = 0, whole = 0;
    for (int64_t k = 0; k < p->depth; k += INT8_STEP, to += INT8_STEP) {
        read_step(step, from, k, p->depth, p->dtype, INT8_STEP);
        if (scale > 0) round_step(rounded, step, 1 / scale, INT8_STEP);
        for (int i = 0; i < INT8_STEP; i++) {
            const double part = (double)step[i] - (double)scale * rounded[i];
            to[i] = (int8_t)rounded[i];
            left_out += part * part;
            whole += (double)step[i] * step[i];
        }
    }
    p->scales[row] = scale;
    p->left_out[row] = (float)(sqrt(left_out) * (1 + 0x1p-20));
    p->norms[row] = (float)(sqrt(whole) * (1 + 0x1p-20));
}

static void pack_int8_chunk(void *of, int64_t chunk, int thread) {
    const weight_packing *p = of;
    const int64_t first = chunk * CHUNK_ROWS, end = skinny_min(first + CHUNK_ROWS, p->outputs);
    (void)thread;
    for (int64_t row = first; row < end; row++) pack_int8_row(p, row);
}

static work_step int8_step(weight_packing *p) {
    return (work_step){.work = pack_int8_chunk, .of = p, .chunks = skinny_parts(p->outputs, CHUNK_ROWS)};
}
