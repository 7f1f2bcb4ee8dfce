/* The kernel for one instruction set. The including header defines
 *
 *   ISA, TARGET                  suffix of the names; attribute of the functions
 *   VEC, LANES, PANEL_ROWS       a vector of LANES floats; input rows of one register tile
 *   ZERO(), LOAD(p), STORE(p, v), ADD(a, b), FMA(a, b, c)       float32, any alignment
 *   LOAD_BF16(p), LOAD_F16(p), STORE_BF16(p, v), STORE_F16(p, v)  to and from float32
 *   SUM_LANES(a, b, c, d, out)   four sums over lanes, written side by side
 *
 * and gets `skinny_run_<ISA>`. No include guard: it is compiled once for each of them.
 */

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

/* The first `count` (at most LANES) elements, zeros behind them. */
TARGET static ALWAYS_INLINE VEC NAMED(read_part)(const char *from, int64_t count, int dtype) {
    char part[LANES * 4] = {0};
    memcpy(part, from, count * skinny_item_bytes(dtype));
    return NAMED(read)(part, dtype);
}

/* One row as float32, padded with zeros to whole vectors, `step` floats from vector to vector. */
TARGET static void NAMED(widen)(float *to, int64_t step, const char *from, int64_t depth, int dtype) {
    const int64_t bytes = skinny_item_bytes(dtype);
    int64_t k = 0;
    for (; k + LANES <= depth; k += LANES, to += step)
        STORE(to, NAMED(read)(from + k * bytes, dtype));
    if (k < depth) STORE(to, NAMED(read_part)(from + k * bytes, depth - k, dtype));
}

/* Panels of x one after another, each as [depth / LANES][its rows][LANES]: a tile reads forward. */
TARGET static void NAMED(pack_panels)(float *panels, const skinny_pass *pass) {
    const skinny_problem *p = pass->problem;
    const int64_t row_bytes = p->x_stride * skinny_item_bytes(p->dtype);
    for (int64_t i = 0; i < pass->panel_count; i++) {
        const int64_t start = skinny_panel_start(pass, i), end = skinny_panel_start(pass, i + 1);
        float *panel = panels + start * pass->padded_depth;
        for (int64_t row = start; row < end; row++)
            NAMED(widen)(panel + (row - start) * LANES, (end - start) * LANES,
                         p->x + row * row_bytes, p->depth, p->dtype);
    }
}

/* Weights that will be needed next, fetched `lines` cache lines with every step of a tile. */
typedef struct {
    const char *address;
    int64_t lines;
} NAMED(ahead);

/* TILE_ROWS weight rows times `rows` input rows; sums[row * CHUNK_ROWS + weight row]. */
TARGET static ALWAYS_INLINE void NAMED(tile)(const int rows, const float *const weight[TILE_ROWS],
                                             const float *panel, int64_t padded_depth,
                                             NAMED(ahead) ahead, float *sums) {
    VEC acc[TILE_ROWS][PANEL_ROWS];
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < TILE_ROWS; o++) acc[o][r] = ZERO();
    for (int64_t k = 0; k < padded_depth; k += LANES) {
        for (int64_t line = 0; line < ahead.lines; line++, ahead.address += CACHE_LINE)
            PREFETCH(ahead.address);
        VEC w[TILE_ROWS];
        for (int o = 0; o < TILE_ROWS; o++) w[o] = LOAD(weight[o] + k);
        for (int r = 0; r < rows; r++, panel += LANES) {
            const VEC x = LOAD(panel);
            for (int o = 0; o < TILE_ROWS; o++) acc[o][r] = FMA(w[o], x, acc[o][r]);
        }
    }
    for (int r = 0; r < rows; r++)
        SUM_LANES(acc[0][r], acc[1][r], acc[2][r], acc[3][r], sums + r * CHUNK_ROWS);
}

/* `tile` with its row count known to the compiler, so that the accumulators live in registers. */
TARGET static void NAMED(tile_of)(int64_t rows, const float *const weight[TILE_ROWS],
                                  const float *panel, int64_t padded_depth, NAMED(ahead) ahead,
                                  float *sums) {
    switch (rows) {
        case 1: NAMED(tile)(1, weight, panel, padded_depth, ahead, sums); break;
        case 2: NAMED(tile)(2, weight, panel, padded_depth, ahead, sums); break;
#if PANEL_ROWS >= 3
        case 3: NAMED(tile)(3, weight, panel, padded_depth, ahead, sums); break;
#endif
#if PANEL_ROWS >= 4
        case 4: NAMED(tile)(4, weight, panel, padded_depth, ahead, sums); break;
#endif
#if PANEL_ROWS >= 5
        case 5: NAMED(tile)(5, weight, panel, padded_depth, ahead, sums); break;
#endif
#if PANEL_ROWS >= 6
        case 6: NAMED(tile)(6, weight, panel, padded_depth, ahead, sums); break;
#endif
    }
}

/* All panels times the weight rows from `first`; the next rows are fetched meanwhile, spread over
 * the panels so that memory stays busy while the arithmetic runs from the caches. */
TARGET static void NAMED(tile_row)(const skinny_pass *pass, const float *const weight[TILE_ROWS],
                                   int64_t first, float *sums) {
    const skinny_problem *p = pass->problem;
    const int64_t row_bytes = p->weight_stride * skinny_item_bytes(p->dtype);
    const int64_t steps = pass->padded_depth / LANES;
    const int64_t block_lines = TILE_ROWS * row_bytes / CACHE_LINE + 1;
    const int64_t panel_lines = block_lines / pass->panel_count + 1;
    const char *next = p->weight + (first + TILE_ROWS) * row_bytes;
    const int64_t per_step = (panel_lines + steps - 1) / steps;
    for (int64_t i = 0; i < pass->panel_count; i++) {
        const int64_t start = skinny_panel_start(pass, i), end = skinny_panel_start(pass, i + 1);
        const int64_t fetched = i * steps * per_step;
        const NAMED(ahead) ahead = {next + fetched * CACHE_LINE,
                                    fetched < block_lines ? per_step : 0};
        NAMED(tile_of)(end - start, weight, pass->panels + start * pass->padded_depth,
                       pass->padded_depth, ahead, sums + start * CHUNK_ROWS);
    }
}

/* TILE_ROWS weight rows from `first` as float32 in whole vectors: in place where they are that
 * already, widened into `buffer` where not. Rows past the last repeat it; nobody reads their sums. */
TARGET static void NAMED(weight_rows)(const skinny_pass *pass, int64_t first, float *buffer,
                                      const float *rows[TILE_ROWS]) {
    const skinny_problem *p = pass->problem;
    const int in_place = p->dtype == SKINNY_FLOAT32 && p->depth == pass->padded_depth;
    for (int o = 0; o < TILE_ROWS; o++) {
        const int64_t row = skinny_min(first + o, p->outputs - 1);
        const char *from = p->weight + row * p->weight_stride * skinny_item_bytes(p->dtype);
        float *widened = buffer + o * pass->padded_depth;
        if (!in_place) NAMED(widen)(widened, LANES, from, p->depth, p->dtype);
        rows[o] = in_place ? (const float *)from : widened;
    }
}

/* Sums plus bias, rounded once to the output's dtype. */
TARGET static void NAMED(write_outputs)(const skinny_problem *p, int64_t first, int64_t count,
                                        const float *sums) {
    const int64_t bytes = skinny_item_bytes(p->dtype);
    for (int64_t o = 0; o < count; o += LANES) {
        const int64_t lanes = skinny_min(LANES, count - o);
        const char *from = p->bias ? p->bias + (first + o) * bytes : NULL;
        const VEC bias = from ? NAMED(read_part)(from, lanes, p->dtype) : ZERO();
        for (int64_t row = 0; row < p->rows; row++) {
            const VEC value = ADD(LOAD(sums + row * CHUNK_ROWS + o), bias);
            char *to = p->y + (row * p->y_stride + first + o) * bytes;
            if (lanes == LANES) {
                NAMED(write)(to, value, p->dtype);
            } else {
                char part[LANES * 4];
                NAMED(write)(part, value, p->dtype);
                memcpy(to, part, lanes * bytes);
            }
        }
    }
}

/* What one thread does: chunks of output rows until none is left. */
TARGET static void NAMED(work)(void *shared) {
    skinny_pass *pass = shared;
    const skinny_problem *p = pass->problem;
    float *sums = (float *)(pass->scratch + FETCH_ADD(&pass->next_thread) * pass->scratch_bytes);
    float *buffer = sums + p->rows * CHUNK_ROWS;
    const float *weight[TILE_ROWS];
    int64_t first;
    while ((first = FETCH_ADD(&pass->next_chunk) * CHUNK_ROWS) < p->outputs) {
        const int64_t count = skinny_min(CHUNK_ROWS, p->outputs - first);
        for (int64_t o = 0; o < count; o += TILE_ROWS) {
            NAMED(weight_rows)(pass, first + o, buffer, weight);
            NAMED(tile_row)(pass, weight, first + o, sums + o);
        }
        NAMED(write_outputs)(p, first, count, sums);
    }
}

/* At most PASS_ROWS rows. Returns 0, or -1 when memory ran out. */
TARGET static int NAMED(run_pass)(const skinny_problem *p, int threads) {
    skinny_pass pass = {.problem = p};
    pass.padded_depth = skinny_round_up(p->depth, LANES);
    pass.panel_count = (p->rows + PANEL_ROWS - 1) / PANEL_ROWS;
    pass.scratch_bytes = skinny_round_up(
        4 * (p->rows * CHUNK_ROWS + TILE_ROWS * pass.padded_depth), CACHE_LINE);
    const int64_t panel_bytes = skinny_round_up(4 * p->rows * pass.padded_depth, CACHE_LINE);
    char *memory = malloc(panel_bytes + threads * pass.scratch_bytes + CACHE_LINE);
    if (!memory) return -1;
    char *aligned = memory + (CACHE_LINE - (uintptr_t)memory % CACHE_LINE);
    pass.panels = (float *)aligned;
    pass.scratch = aligned + panel_bytes;
    NAMED(pack_panels)((float *)aligned, &pass);
    openmp_parallel(NAMED(work), &pass, threads);
    free(memory);
    return 0;
}

TARGET static int NAMED(run)(const skinny_problem *problem, int threads) {
    skinny_problem part = *problem;
    const int64_t bytes = skinny_item_bytes(part.dtype);
    const int64_t chunks = (part.outputs + CHUNK_ROWS - 1) / CHUNK_ROWS;
    int failed = 0;
    for (int64_t row = 0; row < problem->rows && !failed; row += PASS_ROWS) {
        part.rows = skinny_min(PASS_ROWS, problem->rows - row);
        part.x = problem->x + row * problem->x_stride * bytes;
        part.y = problem->y + row * problem->y_stride * bytes;
        failed = NAMED(run_pass)(&part, (int)skinny_min(threads, chunks));
    }
    return failed;
}

#undef ISA
#undef TARGET
#undef VEC
#undef LANES
#undef PANEL_ROWS
#undef ZERO
#undef LOAD
#undef STORE
#undef ADD
#undef FMA
#undef LOAD_BF16
#undef LOAD_F16
#undef STORE_BF16
#undef STORE_F16
#undef SUM_LANES
