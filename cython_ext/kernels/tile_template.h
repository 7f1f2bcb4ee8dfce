/* Register tiles for one instruction set: the products of a few rows of a streamed matrix with a few
 * packed rows. The file of the instruction set defines
 *
 *   VEC, LANES, PANEL_ROWS       a vector of LANES floats; input rows of one register tile
 *   ZERO(), SET1(x), LOAD(p), STORE(p, v)        float32, any alignment
 *   ADD(a, b), MUL(a, b), MAX(a, b), FMA(a, b, c)           of a NaN and b, MAX is b or NaN; of a and NaN, NaN
 *   load_bf16(p), store_bf16(p, v), LOAD_F16(p), STORE_F16(p, v)  from and to other dtypes
 *   load_int8(p)                 to float32
 *   power2(t)                    2^n from t = 1.5 * 2^23 + n, n from -127 (giving 0) to 0
 *   sum_lanes(a, b, c, d, out)   four sums over lanes, written side by side
 *   PACKED_DTYPE                 what the multiplication takes: float32, LANES to a vector, or
 *                                bfloat16, twice as many; other dtypes are widened to it
 *   MULTIPLY_ADD(w, x, sum)      on vectors of PACKED_DTYPE or their parts, adding to a VEC
 *   PARTS, PART(operand, i)      where one vector is multiplied in parts: how many, and the i-th as a VEC
 *
 * and includes templates.h.
 */

#ifndef PARTS
#define PARTS 1
#define PART(operand, i) (operand)
#endif
#define STEP (PACKED_DTYPE == SKINNY_FLOAT32 ? LANES : 2 * LANES)
#define STEP_BYTES (PARTS * LANES * 4)

/* STEP elements, ready to be multiplied. */
static ALWAYS_INLINE VEC operand(const char *from, int dtype) {
    return read_lanes(from, dtype == PACKED_DTYPE ? SKINNY_FLOAT32 : dtype);
}

/* The same of the last `count` < STEP elements of a row, with zeros behind them. */
static VEC last_operand(const char *from, int64_t count, int dtype) {
    char part[STEP_BYTES] = {0};
    memcpy(part, from, count * skinny_item_bytes(dtype));
    return operand(part, dtype);
}

static ALWAYS_INLINE void pack_step(char *to, VEC x) {
    for (int i = 0; i < PARTS; i++) STORE((float *)to + i * LANES, PART(x, i));
}

/* One row of x for the multiplication, STEP elements every `stride` bytes. */
static void pack_row(char *to, int64_t stride, const char *from, int64_t depth, int dtype) {
    const int64_t bytes = skinny_item_bytes(dtype);
    int64_t k = 0;
    for (; k + STEP <= depth; k += STEP, to += stride) pack_step(to, operand(from + k * bytes, dtype));
    if (k < depth) pack_step(to, last_operand(from + k * bytes, depth - k, dtype));
}

static ALWAYS_INLINE const char *weight_row(const skinny_tile *t, int64_t o) {
    const char *row = t->weight + o * t->weight_step;
    return row < t->last ? row : t->last;
}

static ALWAYS_INLINE void fetch_step(const skinny_tile *t, const char *fetch) {
    PREFETCH(fetch), PREFETCH(fetch + t->fetch_again);
    if (t->fetch_apart) PREFETCH(fetch + t->fetch_apart), PREFETCH(fetch + t->fetch_apart + t->fetch_again);
}

/* acc[input row][weight row] += one step of both. The input rows wait in registers and the weight rows
 * pass by: one register less than the other way round, which lets the tile fit into 16 or 32 of them. */
static ALWAYS_INLINE void step(const int rows, const int dtype, const char *const weight[TILE_ROWS], const char *panel,
                               int64_t k, VEC acc[PANEL_ROWS][TILE_ROWS]) {
    UNROLL for (int i = 0; i < PARTS; i++) {
        if (PARTS > 1) __asm__ volatile("" ::: "memory"); /* one after the other, as there are registers for */
        VEC x[PANEL_ROWS];
        UNROLL for (int r = 0; r < rows; r++)
            x[r] = LOAD((const float *)(panel + r * STEP_BYTES) + i * LANES);
        UNROLL for (int o = 0; o < TILE_ROWS; o++) {
            const VEC w = PART(operand(weight[o] + k * skinny_item_bytes(dtype), dtype), i);
            UNROLL for (int r = 0; r < rows; r++) acc[r][o] = MULTIPLY_ADD(w, x[r], acc[r][o]);
        }
    }
}

/* What the last step reads of the weights, of less than STEP elements from the k-th, with zeros behind them. */
static void copy_last_step(const skinny_tile *t, int64_t k, int64_t bytes, char part[TILE_ROWS][STEP_BYTES]) {
    memset(part, 0, TILE_ROWS * STEP_BYTES);
    for (int o = 0; o < TILE_ROWS; o++) memcpy(part[o], weight_row(t, o) + k * bytes, (t->depth - k) * bytes);
}

static ALWAYS_INLINE void store_sums(const int rows, const skinny_tile *t, VEC acc[PANEL_ROWS][TILE_ROWS]) {
    UNROLL for (int r = 0; r < rows; r++) {
        float sums[TILE_ROWS], *to = t->sums + r * t->sums_stride;
        sum_lanes(acc[r][0], acc[r][1], acc[r][2], acc[r][3], t->sums_step == 1 ? to : sums);
        for (int o = 0; o < TILE_ROWS && t->sums_step != 1; o++) to[o * t->sums_step] = sums[o];
    }
}

/* TILE_ROWS weight rows times one panel; into t->sums. A tile is handed on by its address: a copy, read by vectors
 * from where numbers were just written one by one, would wait for all that was begun before. */
static ALWAYS_INLINE void tile(const int rows, const int dtype, const skinny_tile *t) {
    const int64_t depth = t->depth, bytes = skinny_item_bytes(dtype);
    const char *weight[TILE_ROWS], *panel = t->panel, *fetch = t->fetch;
    char part[TILE_ROWS][STEP_BYTES];
    VEC acc[PANEL_ROWS][TILE_ROWS];
    UNROLL for (int o = 0; o < TILE_ROWS; o++) weight[o] = weight_row(t, o);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int o = 0; o < TILE_ROWS; o++) acc[r][o] = ZERO();
    for (int64_t k = 0; k < depth; k += STEP, panel += rows * STEP_BYTES, fetch += t->fetch_step) {
        if (k + STEP > depth) {
            copy_last_step(t, k, bytes, part);
            UNROLL for (int o = 0; o < TILE_ROWS; o++) weight[o] = part[o] - k * bytes;
        }
        fetch_step(t, fetch);
        step(rows, dtype, weight, panel, k, acc);
    }
    store_sums(rows, t, acc);
}

/* The same with row count and dtype known to the compiler, so that the sums live in registers. */
#define TILE_CASE(many)                                                                     \
    if (are_rows(rows, many)) {                                                             \
        if (dtype == PACKED_DTYPE)                                                          \
            tile(many, PACKED_DTYPE, t);                                                    \
        else if (dtype == SKINNY_BFLOAT16)                                                  \
            tile(many, SKINNY_BFLOAT16, t);                                                 \
        else if (dtype == SKINNY_INT8)                                                      \
            tile(many, SKINNY_INT8, t);                                                     \
        else                                                                                \
            tile(many, SKINNY_FLOAT16, t);                                                  \
    }

static void tile_of(int64_t rows, int dtype, const skinny_tile *t) { CASES(PANEL_ROWS, TILE_CASE) }
