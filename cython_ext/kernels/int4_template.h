/* Weights in four bits for one instruction set; see linear_kernels.h. Groups of a row have a scale of their own,
 * and so have those of x, in integers of eight bits; products within a group are exact. Besides what
 * tile_template.h asks for, the instruction set defines
 *
 *   add_int4(sums, w, x)   adds to int8_sums the products of LANES outputs with 8 numbers of x: their first four with
 *                          the levels of the low halves of the outputs' bytes, 4 of each, the others with the high ones
 */

/* Scales that are tried of either sign, and the greatest. */
#define INT4_TURNS 3
#define MOST_F16 65504.0f

/* Blocks that are read at once, of as many as there are registers for. */
#define INT4_PLACES (LANES >= 8 ? LANES / 4 : 1)

/* x in a group: what its sums are multiplied by, what is added to them before, and its numbers. */
typedef struct {
    float scale, offset;
    int8_t values[INT4_GROUP];
} int4_x;

/* One row of x, a group every `stride` bytes. */
static void pack_int4_x(char *to, int64_t stride, const char *from, int64_t depth, int dtype) {
    for (int64_t k = 0; k < depth; k += INT4_GROUP, to += stride) {
        int4_x *group = (int4_x *)to;
        float step[INT4_GROUP];
        int16_t rounded[INT4_GROUP] = {0};
        int sum = 0;
        read_step(step, from, k, depth, dtype, INT4_GROUP);
        group->scale = scale_of(skinny_float_of(greatest_bits(step, INT4_GROUP)), INT8_MOST);
        if (group->scale > 0) round_step(rounded, step, 1 / group->scale, INT4_GROUP);
        for (int i = 0; i < INT4_GROUP; i++) group->values[i] = (int8_t)rounded[i], sum += rounded[i];
        group->offset = -INT4_ZERO * (float)sum;
    }
}

/* Some rows times INT4_ROWS outputs in each of some places: as many streams, each of which the hardware follows.
 * sums[row * CHUNK_ROWS + place * apart + output]. */
static ALWAYS_INLINE void int4_blocks(const int rows, const int places, const char *const *blocks, int64_t groups,
                                      const int4_x *x, float *sums, int64_t apart) {
    enum { PARTS_OF_BLOCK = INT4_ROWS / LANES };
    VEC acc[INT4_PLACES][PANEL_ROWS][PARTS_OF_BLOCK];
    for (int p = 0; p < places; p++)
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < PARTS_OF_BLOCK; i++) acc[p][r][i] = ZERO();
    for (int64_t g = 0; g < groups; g++, x += rows)
        for (int p = 0; p < places; p++) {
            const char *block = blocks[p] + g * INT4_BLOCK_BYTES, *values = block + INT4_ROWS * 2;
            for (int line = 0; line < INT4_BLOCK_BYTES; line += CACHE_LINE) PREFETCH(block + AHEAD + line);
            for (int i = 0; i < PARTS_OF_BLOCK; i++) {
                const VEC scales = LOAD_F16(block + i * LANES * 2);
                int8_sums products[PANEL_ROWS];
                for (int r = 0; r < rows; r++) products[r] = no_sums();
                for (int k = 0; k < INT4_GROUP / 8; k++) {
                    const char *w = values + (k * INT4_ROWS + i * LANES) * 4;
                    for (int r = 0; r < rows; r++)
                        products[r] = add_int4(products[r], w, (const char *)x[r].values + 8 * k);
                }
                for (int r = 0; r < rows; r++) {
                    const VEC exact = ADD(to_floats(products[r]), SET1(x[r].offset));
                    acc[p][r][i] = FMA(MUL(scales, SET1(x[r].scale)), exact, acc[p][r][i]);
                }
            }
        }
    for (int p = 0; p < places; p++)
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < PARTS_OF_BLOCK; i++)
                STORE(sums + r * CHUNK_ROWS + p * apart + i * LANES, acc[p][r][i]);
}

#define INT4_CASE(many)                                                     \
    if (are_rows(rows, many)) {                                             \
        if (places == 1)                                                    \
            int4_blocks(many, 1, blocks, groups, x, sums, apart);           \
        else                                                                \
            int4_blocks(many, INT4_PLACES, blocks, groups, x, sums, apart); \
    }

static void int4_blocks_of(int64_t rows, int places, const char *const *blocks, int64_t groups, const int4_x *x,
                           float *sums, int64_t apart) {
    CASES(PANEL_ROWS, INT4_CASE)
}

/* All rows times the outputs [first, end) of a chunk. */
static void multiply_int4(const linear_pass *pass, const linear_problem *p, int64_t first, int64_t end, float *sums) {
    const int64_t groups = skinny_parts(p->depth, INT4_GROUP), all = skinny_parts(end - first, INT4_ROWS);
    const int64_t apart = all / INT4_PLACES, rest = all % INT4_PLACES;
    const char *from = p->weight + first * p->weight_stride;
    for (int64_t turn = 0; turn < apart + rest; turn++) {
        const int places = turn < apart ? INT4_PLACES : 1;
        const int64_t block = turn < apart ? turn : turn + (INT4_PLACES - 1) * apart;
        const char *blocks[INT4_PLACES];
        for (int i = 0; i < places; i++) blocks[i] = from + (block + i * apart) * INT4_ROWS * p->weight_stride;
        for (int64_t i = 0; i < pass->panel_count; i++) {
            const int64_t start = linear_panel_start(pass, i);
            int4_blocks_of(linear_panel_start(pass, i + 1) - start, places, blocks, groups,
                           (const int4_x *)(pass->panels + start * pass->packed_bytes),
                           sums + start * CHUNK_ROWS + block * INT4_ROWS, apart * INT4_ROWS);
        }
    }
}

/* The levels that are nearest to the elements of a group times a factor, less the first level; or their numbers.
 * Elements are rounded to half a unit of the levels. */
static ALWAYS_INLINE void climb(int16_t *sums, const float *step, float factor, const int numbers) {
    float cut[INT4_GROUP];
    int16_t doubled[INT4_GROUP];
    for (int i = 0; i < INT4_GROUP; i++) {
        const float x = 2 * factor * step[i], above = x > -256 ? x : -256;
        cut[i] = above < 256 ? above : 256;
    }
    round_step(doubled, cut, 1, INT4_GROUP);
    memset(sums, 0, INT4_GROUP * sizeof(*sums));
    for (int k = 1; k < 16; k++) {
        const int16_t middle = (int16_t)(int4_levels[k - 1] + int4_levels[k] - 2 * INT4_ZERO);
        const int16_t more = (int16_t)(numbers ? 1 : int4_levels[k] - int4_levels[k - 1]);
        for (int i = 0; i < INT4_GROUP; i++) sums[i] += (int16_t)(-(doubled[i] > middle) & more); /* a mask */
    }
}

/* What the nearest levels times a scale leave out of a group, squared, less the group's own square; and the scale of
 * least squares for them. */
static ALWAYS_INLINE float left_out_of(const float *step, const float *weights, float scale, float *better) {
    int16_t above[INT4_GROUP];
    float levels[INT4_GROUP];
    VEC products = ZERO(), squares = ZERO();
    climb(above, step, 1 / scale, 0);
    for (int i = 0; i < INT4_GROUP; i++) levels[i] = (float)(above[i] + int4_levels[0] - INT4_ZERO);
    for (int i = 0; i < INT4_GROUP; i += LANES) {
        const VEC level = LOAD(levels + i), weighted = MUL(LOAD(weights + i), level);
        products = FMA(weighted, LOAD(step + i), products), squares = FMA(weighted, level, squares);
    }
    float sums[4];
    sum_lanes(products, squares, ZERO(), ZERO(), sums);
    *better = sums[0] / sums[1];
    return scale * (scale * sums[1] - 2 * sums[0]);
}

/* The scale, in float16's bits, with which the levels leave out least of a group, its columns counting by their
 * weights. Of either sign, the first one makes the element of the greatest magnitude the first level, or as far from
 * zero; others follow as the least squares of the levels that were nearest. */
static uint16_t int4_scale_of(const float *step, const float *weights) {
    const float most = skinny_float_of(greatest_bits(step, INT4_GROUP));
    float least = INFINITY;
    uint16_t best = 0; /* stays for zeros, and for what float16 takes for them */
    if (!(most < INFINITY)) return skinny_f16_of(most); /* what is not finite has no finite products either */
    float scales[2] = {-most / INT4_ZERO, most / INT4_ZERO};
    for (int turn = 0; turn < 2 * INT4_TURNS; turn++) { /* signs in turn: a CPU works at both */
        const float scale = scales[turn % 2], cut = scale > MOST_F16 ? MOST_F16 : scale < -MOST_F16 ? -MOST_F16 : scale;
        const uint16_t half = skinny_f16_of(cut);
        const float tried = skinny_float_of_f16(half);
        if (!(tried != 0 && tried == tried)) continue;
        const float left_out = left_out_of(step, weights, tried, &scales[turn % 2]);
        if (left_out <= least) best = half, least = left_out;
    }
    return best;
}

static void pack_int4_group(const weight_packing *p, char *block, int64_t output, int64_t k, const float *weights) {
    const int64_t o = output % INT4_ROWS, bytes = skinny_item_bytes(p->dtype);
    float step[INT4_GROUP] = {0};
    int16_t numbers[INT4_GROUP];
    uint8_t *to = (uint8_t *)block + INT4_ROWS * 2 + o * 4;
    if (output < p->outputs)
        read_step(step, p->weight + output * p->weight_stride * bytes, k, p->depth, p->dtype, INT4_GROUP);
    const uint16_t half = int4_scale_of(step, weights);
    const float scale = skinny_float_of_f16(half), factor = scale == 0 ? 0 : 1 / scale;
    climb(numbers, step, factor, 1);
    memcpy(block + o * 2, &half, 2);
    for (int i = 0; i < INT4_GROUP; i += 8, to += INT4_ROWS * 4)
        for (int b = 0; b < 4; b++) to[b] = (uint8_t)(numbers[i + b] | numbers[i + 4 + b] << 4);
}

/* A block for each group of the same outputs. Columns beside the matrix do not count. */
static void pack_int4_blocks(void *of, int64_t chunk, int thread) {
    const weight_packing *p = of;
    char *block = p->values + chunk * skinny_parts(p->depth, INT4_GROUP) * INT4_BLOCK_BYTES;
    (void)thread;
    for (int64_t k = 0; k < p->depth; k += INT4_GROUP, block += INT4_BLOCK_BYTES) {
        float weights[INT4_GROUP];
        read_step(weights, (const char *)p->column_weights, k, p->depth, SKINNY_FLOAT32, INT4_GROUP);
        for (int64_t o = 0; o < INT4_ROWS; o++) pack_int4_group(p, block, chunk * INT4_ROWS + o, k, weights);
    }
}

static work_step int4_step(weight_packing *p) {
    return (work_step){.work = pack_int4_blocks, .of = p, .chunks = skinny_parts(p->outputs, INT4_ROWS)};
}
