/* The kernel for one instruction set. The including header defines
 *
 *   ISA, TARGET                  suffix of the names; attribute of the functions
 *   VEC, LANES, PANEL_ROWS       a vector of LANES floats; input rows of one register tile
 *   ZERO(), LOAD(p), STORE(p, v), ADD(a, b)      float32, any alignment
 *   LOAD_BF16(p), LOAD_F16(p), STORE_BF16(p, v), STORE_F16(p, v)  to and from float32
 *   SUM_LANES(a, b, c, d, out)   four sums over lanes, written side by side
 *   PACKED_DTYPE                 what the multiplication takes: float32, LANES to a vector, or
 *                                bfloat16, twice as many; other dtypes are widened to it
 *   MULTIPLY_ADD(w, x, sum)      on vectors of PACKED_DTYPE, adding to a VEC
 *
 * and gets `skinny_run_<ISA>`. No include guard: it is compiled once for each of them, and forgets
 * the macros that name it, its target and its multiplication.
 */

#define STEP (PACKED_DTYPE == SKINNY_FLOAT32 ? LANES : 2 * LANES)
#define STEP_BYTES (LANES * 4)

TARGET static ALWAYS_INLINE VEC NAMED(read)(const char *from, int dtype) {
    if (dtype == SKINNY_FLOAT32) return LOAD((const float *)from);
    return dtype == SKINNY_BFLOAT16 ? LOAD_BF16(from) : LOAD_F16(from);
}

TARGET static ALWAYS_INLINE void NAMED(write)(char *to, VEC value, int dtype) {
    if (dtype == SKINNY_FLOAT32)
        STORE((float *)to, value);
    else if (dtype == SKINNY_BFLOAT16)
        STORE_BF16(to, value);
    else
        STORE_F16(to, value);
}

/* STEP elements, ready to be multiplied. */
TARGET static ALWAYS_INLINE VEC NAMED(operand)(const char *from, int dtype) {
    return NAMED(read)(from, dtype == PACKED_DTYPE ? SKINNY_FLOAT32 : dtype);
}

/* The same of the last `count` < STEP elements of a row, with zeros behind them. */
TARGET static VEC NAMED(last_operand)(const char *from, int64_t count, int dtype) {
    char part[STEP_BYTES] = {0};
    memcpy(part, from, count * skinny_item_bytes(dtype));
    return NAMED(operand)(part, dtype);
}

/* One row of x for the multiplication, STEP elements every `stride` bytes. */
TARGET static void NAMED(pack_row)(char *to, int64_t stride, const char *from, int64_t depth,
                                   int dtype) {
    const int64_t bytes = skinny_item_bytes(dtype);
    int64_t k = 0;
    for (; k + STEP <= depth; k += STEP, to += stride)
        STORE((float *)to, NAMED(operand)(from + k * bytes, dtype));
    if (k < depth) STORE((float *)to, NAMED(last_operand)(from + k * bytes, depth - k, dtype));
}

/* Panels of x one after another, each as [steps][its rows][STEP]: a tile reads them forward. */
TARGET static void NAMED(pack_panels)(char *panels, const skinny_pass *pass) {
    const skinny_problem *p = pass->problem;
    const int64_t row_bytes = p->x_stride * skinny_item_bytes(p->dtype);
    for (int64_t i = 0; i < pass->panel_count; i++) {
        const int64_t start = skinny_panel_start(pass, i), end = skinny_panel_start(pass, i + 1);
        char *panel = panels + start * pass->packed_bytes;
        for (int64_t row = start; row < end; row++)
            NAMED(pack_row)(panel + (row - start) * STEP_BYTES, (end - start) * STEP_BYTES,
                            p->x + row * row_bytes, p->depth, p->dtype);
    }
}

/* acc[input row][weight row] += one step of both, `count` elements of it. The input rows wait in
 * registers and the weight rows pass by: one register less than the other way round, which lets the
 * tile fit into 16 or 32 of them. */
TARGET static ALWAYS_INLINE void NAMED(step)(const int rows, const int dtype, const skinny_tile *t,
                                             int64_t k, int64_t count,
                                             VEC acc[PANEL_ROWS][TILE_ROWS]) {
    VEC x[PANEL_ROWS];
    for (int r = 0; r < rows; r++) x[r] = LOAD((const float *)(t->panel + r * STEP_BYTES));
    for (int o = 0; o < TILE_ROWS; o++) {
        const char *from = t->weight[o] + k * skinny_item_bytes(dtype);
        const VEC w = count == STEP ? NAMED(operand)(from, dtype)
                                    : NAMED(last_operand)(from, count, dtype);
        for (int r = 0; r < rows; r++) acc[r][o] = MULTIPLY_ADD(w, x[r], acc[r][o]);
    }
}

/* TILE_ROWS weight rows times one panel; sums[input row * CHUNK_ROWS + weight row]. */
TARGET static ALWAYS_INLINE void NAMED(tile)(const int rows, const int dtype, skinny_tile t) {
    VEC acc[PANEL_ROWS][TILE_ROWS];
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < TILE_ROWS; o++) acc[r][o] = ZERO();
    int64_t k = 0;
    for (; k + STEP <= t.depth; k += STEP, t.panel += rows * STEP_BYTES) {
        for (int64_t line = 0; line < t.ahead_lines; line++, t.ahead += CACHE_LINE)
            PREFETCH(t.ahead);
        NAMED(step)(rows, dtype, &t, k, STEP, acc);
    }
    if (k < t.depth) NAMED(step)(rows, dtype, &t, k, t.depth - k, acc);
    for (int r = 0; r < rows; r++)
        SUM_LANES(acc[r][0], acc[r][1], acc[r][2], acc[r][3], t.sums + r * CHUNK_ROWS);
}

/* The same with row count and dtype known to the compiler, so that the sums live in registers. */
#define TILE_CASE(rows)                                                                     \
    case rows:                                                                              \
        if (dtype == PACKED_DTYPE)                                                          \
            NAMED(tile)(rows, PACKED_DTYPE, t);                                             \
        else if (dtype == SKINNY_BFLOAT16)                                                  \
            NAMED(tile)(rows, SKINNY_BFLOAT16, t);                                          \
        else                                                                                \
            NAMED(tile)(rows, SKINNY_FLOAT16, t);                                           \
        break;

TARGET static void NAMED(tile_of)(int64_t rows, int dtype, skinny_tile t) {
    switch (rows) {
        TILE_CASE(1)
        TILE_CASE(2)
#if PANEL_ROWS >= 3
        TILE_CASE(3)
#endif
#if PANEL_ROWS >= 4
        TILE_CASE(4)
#endif
#if PANEL_ROWS >= 5
        TILE_CASE(5)
#endif
#if PANEL_ROWS >= 6
        TILE_CASE(6)
#endif
    }
}

/* All panels times the weight rows from `first`; the rows after them are fetched meanwhile, spread
 * over the panels so that memory stays busy while the arithmetic runs from the caches. A tile past
 * the last weight row repeats it: nobody reads those sums. */
TARGET static void NAMED(tile_row)(const skinny_pass *pass, int64_t first, float *sums) {
    const skinny_problem *p = pass->problem;
    const int64_t row_bytes = p->weight_stride * skinny_item_bytes(p->dtype);
    const int64_t steps = pass->packed_bytes / STEP_BYTES;
    const int64_t block_bytes = TILE_ROWS * row_bytes;
    const int64_t block_lines = block_bytes < AHEAD_BYTES ? block_bytes / CACHE_LINE + 1 : 0;
    const int64_t lines = block_lines / (pass->panel_count * steps) + 1;
    const char *next = p->weight + first * row_bytes + block_bytes;
    skinny_tile tile = {.depth = p->depth};
    for (int o = 0; o < TILE_ROWS; o++)
        tile.weight[o] = p->weight + skinny_min(first + o, p->outputs - 1) * row_bytes;
    for (int64_t i = 0; i < pass->panel_count; i++) {
        const int64_t start = skinny_panel_start(pass, i), end = skinny_panel_start(pass, i + 1);
        const int64_t fetched = i * steps * lines;
        tile.panel = pass->panels + start * pass->packed_bytes;
        tile.ahead = next + fetched * CACHE_LINE;
        tile.ahead_lines = fetched < block_lines ? lines : 0;
        tile.sums = sums + start * CHUNK_ROWS;
        NAMED(tile_of)(end - start, p->dtype, tile);
    }
}

/* Sums plus bias for outputs [o, o + count), count <= LANES, rounded once to the output's dtype. */
TARGET static void NAMED(write_outputs)(const skinny_problem *p, int64_t o, int64_t count,
                                        const float *sums) {
    const int64_t bytes = skinny_item_bytes(p->dtype);
    char part[LANES * 4] = {0};
    if (p->bias) memcpy(part, p->bias + o * bytes, count * bytes);
    const VEC bias = NAMED(read)(part, p->dtype);
    for (int64_t row = 0; row < p->rows; row++) {
        const VEC value = ADD(LOAD(sums + row * CHUNK_ROWS), bias);
        char *to = p->y + (row * p->y_stride + o) * bytes;
        if (count == LANES) {
            NAMED(write)(to, value, p->dtype);
        } else {
            NAMED(write)(part, value, p->dtype);
            memcpy(to, part, count * bytes);
        }
    }
}

/* What one thread does: chunks of outputs until none is left. */
TARGET static void NAMED(work)(void *shared) {
    skinny_pass *pass = shared;
    const skinny_problem *p = pass->problem;
    float *sums = pass->sums + FETCH_ADD(&pass->next_thread) * p->rows * CHUNK_ROWS;
    int64_t first;
    while ((first = FETCH_ADD(&pass->next_chunk) * CHUNK_ROWS) < p->outputs) {
        const int64_t count = skinny_min(CHUNK_ROWS, p->outputs - first);
        for (int64_t o = 0; o < count; o += TILE_ROWS)
            NAMED(tile_row)(pass, first + o, sums + o);
        for (int64_t o = 0; o < count; o += LANES)
            NAMED(write_outputs)(p, first + o, skinny_min(LANES, count - o), sums + o);
    }
}

/* At most PASS_ROWS rows. Returns 0, or -1 when memory ran out. */
TARGET static int NAMED(run_pass)(const skinny_problem *p, int threads) {
    skinny_pass pass = {.problem = p};
    pass.packed_bytes = (p->depth + STEP - 1) / STEP * STEP_BYTES;
    pass.panel_count = (p->rows + PANEL_ROWS - 1) / PANEL_ROWS;
    const int64_t panel_bytes = p->rows * pass.packed_bytes;
    const int64_t sums_bytes = threads * p->rows * CHUNK_ROWS * 4;
    char *memory = malloc(sums_bytes + panel_bytes + CACHE_LINE);
    if (!memory) return -1;
    pass.sums = (float *)(memory + (CACHE_LINE - (uintptr_t)memory % CACHE_LINE));
    pass.panels = (char *)pass.sums + sums_bytes;
    /* The last outputs may fill less than the vector that is read of them. */
    memset(pass.sums, 0, sums_bytes);
    NAMED(pack_panels)(pass.panels, &pass);
    openmp_parallel(NAMED(work), &pass, threads);
    free(memory);
    return 0;
}

TARGET static int NAMED(run)(const skinny_problem *problem, int threads) {
    skinny_problem part = *problem;
    const int64_t bytes = skinny_item_bytes(part.dtype);
    const int64_t weight_bytes = part.outputs * part.depth * bytes;
    const int64_t chunks = (part.outputs + CHUNK_ROWS - 1) / CHUNK_ROWS;
    const int64_t useful = skinny_min(chunks, weight_bytes / THREAD_BYTES + 1);
    int failed = 0;
    for (int64_t row = 0; row < problem->rows && !failed; row += PASS_ROWS) {
        part.rows = skinny_min(PASS_ROWS, problem->rows - row);
        part.x = problem->x + row * problem->x_stride * bytes;
        part.y = problem->y + row * problem->y_stride * bytes;
        failed = NAMED(run_pass)(&part, (int)skinny_min(threads, useful));
    }
    return failed;
}

#undef STEP
#undef STEP_BYTES
#undef TILE_CASE
#undef ISA
#undef TARGET
#undef PACKED_DTYPE
#undef MULTIPLY_ADD
