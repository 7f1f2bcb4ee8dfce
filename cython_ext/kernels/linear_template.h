/* The linear layer for one instruction set; see linear_kernels.h and tile_template.h. */

/* Panels of x one after another, each as [steps][its rows][STEP]: a tile reads them forward. */
static void pack_panels(char *panels, const linear_pass *pass) {
    const linear_problem *p = pass->problem;
    if (p->weight_dtype == SKINNY_ROUNDED) return pack_x_panels(panels, pass);
    const int64_t row_bytes = p->x_stride * skinny_item_bytes(p->dtype);
    for (int64_t i = 0; i < pass->panel_count; i++) {
        const int64_t start = pass->panel_starts[i], end = pass->panel_starts[i + 1];
        char *panel = panels + start * pass->packed_bytes;
        for (int64_t row = start; row < end; row++)
            pack_row(panel + (row - start) * STEP_BYTES, (end - start) * STEP_BYTES,
                     p->x + row * row_bytes, p->depth, p->dtype);
    }
}

/* All panels times TILE_ROWS weight rows of a chunk, `apart` rows from one another. The rows behind them
 * are fetched meanwhile, shared out among the panels so that memory stays busy while the arithmetic
 * runs from the caches. A tile past the last weight row repeats it: nobody reads those sums. */
static void tile_row(const linear_pass *pass, int64_t first, int64_t apart, float *sums) {
    const linear_problem *p = pass->problem;
    const int64_t row_bytes = p->weight_stride * skinny_item_bytes(p->weight_dtype);
    const int64_t share = skinny_parts(TILE_ROWS, pass->panel_count);
    skinny_tile tile = {.depth = p->depth, .ahead = row_bytes, .sums_stride = CHUNK_ROWS, .sums_step = apart};
    for (int64_t o = 0; o < TILE_ROWS; o++) {
        const int64_t output = skinny_min(first + o * apart, p->outputs - 1);
        tile.weight[o] = p->weight + output * row_bytes;
    }
    for (int64_t i = 0; i < pass->panel_count; i++) {
        const int64_t start = pass->panel_starts[i], end = pass->panel_starts[i + 1];
        tile.panel = pass->panels + start * pass->packed_bytes;
        tile.fetch_first = skinny_min(i * share, TILE_ROWS);
        tile.fetch_end = skinny_min(tile.fetch_first + share, TILE_ROWS);
        tile.sums = sums + start * CHUNK_ROWS;
        if (p->weight_dtype == SKINNY_ROUNDED)
            int8_tile_of(end - start, tile);
        else
            tile_of(end - start, p->weight_dtype, tile);
    }
}

/* A chunk is read in TILE_ROWS places at once: as many streams, each of which the hardware follows. */
static void chunk(const linear_pass *pass, int64_t first, int64_t count, float *sums) {
    const int64_t apart = skinny_parts(count, TILE_ROWS);
    for (int64_t o = 0; o < apart; o++) tile_row(pass, first + o, apart, sums + o);
}

/* Elements [o, o + count) of one for each output, and zeros behind them; zeros of none. */
static ALWAYS_INLINE VEC of_outputs(const char *all, int64_t o, int64_t count, int dtype) {
    const int64_t bytes = skinny_item_bytes(dtype);
    char part[LANES * 4] = {0};
    if (all) memcpy(part, all + o * bytes, count * bytes);
    return read_lanes(part, dtype);
}

/* Sums, in their scales, plus bias for outputs [o, o + count), count <= LANES, rounded once to the output's
 * dtype. */
static void write_outputs(const linear_pass *pass, int64_t o, int64_t count, const float *sums) {
    const linear_problem *p = pass->problem;
    const int64_t bytes = skinny_item_bytes(p->dtype);
    const VEC bias = of_outputs(p->bias, o, count, p->dtype);
    const VEC scales = of_outputs(p->scales, o, count, p->scale_dtype);
    char part[LANES * 4];
    for (int64_t row = 0; row < p->rows; row++) {
        VEC value = LOAD(sums + row * CHUNK_ROWS);
        if (p->weight_dtype == SKINNY_ROUNDED) value = FMA(value, SET1(pass->x_scales[row]), ZERO());
        if (p->scales) value = FMA(value, scales, ZERO());
        value = ADD(value, bias);
        char *to = p->y + (row * p->y_stride + o) * bytes;
        if (count == LANES) {
            write_lanes(to, value, p->dtype);
        } else {
            write_lanes(part, value, p->dtype);
            memcpy(to, part, count * bytes);
        }
    }
}

/* A chunk of the problem of a pass, the first rows from `first`. */
static void work_at(const linear_pass *pass, int64_t first, int64_t rows, float *sums) {
    const int64_t count = skinny_min(rows, pass->problem->outputs - first);
    chunk(pass, first, count, sums);
    for (int64_t o = 0; o < count; o += LANES)
        write_outputs(pass, first + o, skinny_min(LANES, count - o), sums + o);
}

/* What one thread does: chunks of outputs until none is left. */
static void work(void *shared) {
    linear_pass *all = shared, pass = *all;
    float *sums = pass.sums + FETCH_ADD(&all->next_thread) * pass.problem->rows * CHUNK_ROWS;
    int64_t before = 0; /* chunks of the problems that are done */
    int64_t next = FETCH_ADD(&all->next_chunk);
    for (int i = 0; i < pass.count; i++, pass.problem++) {
        const int64_t rows = pass.chunk_rows[i], chunks = skinny_parts(pass.problem->outputs, rows);
        for (; next < before + chunks; next = FETCH_ADD(&all->next_chunk))
            work_at(&pass, (next - before) * rows, rows, sums);
        before += chunks;
    }
}

/* Takes PASS_ROWS rows at most. Returns 0, or -1 when memory ran out. */
static int run_pass(const linear_problem *p, int count, int threads) {
    float x_scales[PASS_ROWS];
    linear_pass pass = {.problem = p, .count = count, .x_scales = x_scales};
    if (p->weight_dtype == SKINNY_ROUNDED)
        pass.packed_bytes = skinny_parts(p->depth, INT8_STEP) * X_STEP_BYTES;
    else
        pass.packed_bytes = skinny_parts(p->depth, STEP) * STEP_BYTES;
    pass.panel_count = skinny_parts(p->rows, PANEL_ROWS);
    for (int64_t i = 0; i <= pass.panel_count; i++) pass.panel_starts[i] = p->rows * i / pass.panel_count;
    for (int i = 0; i < count; i++) pass.chunk_rows[i] = linear_chunk_rows(p[i].outputs, threads);
    const int64_t panel_bytes = p->rows * pass.packed_bytes;
    const int64_t sums_bytes = threads * p->rows * CHUNK_ROWS * 4;
    char *memory = malloc(sums_bytes + panel_bytes + CACHE_LINE);
    if (!memory) return -1;
    pass.sums = (float *)(memory + (CACHE_LINE - (uintptr_t)memory % CACHE_LINE));
    pass.panels = (char *)pass.sums + sums_bytes;
    /* The last outputs may fill less than the vector that is read of them. */
    memset(pass.sums, 0, sums_bytes);
    pack_panels(pass.panels, &pass);
    openmp_parallel(work, &pass, threads);
    free(memory);
    return 0;
}

/* `count` problems, at most MAX_TOGETHER, that differ in weights, biases and outputs alone. */
static int linear(const linear_problem *problems, int count, int threads) {
    linear_problem parts[MAX_TOGETHER];
    const int64_t rows = problems->rows, bytes = skinny_item_bytes(problems->dtype);
    int64_t weight_bytes = 0, chunks = 1;
    int failed = 0;
    for (int i = 0; i < count; i++) {
        const linear_problem *p = problems + i;
        weight_bytes += p->outputs * p->depth * skinny_item_bytes(p->weight_dtype);
        chunks += skinny_parts(p->outputs, CHUNK_MULTIPLE);
    }
    const int useful = (int)skinny_min(threads, skinny_min(chunks, weight_bytes / THREAD_BYTES + 1));
    for (int64_t row = 0; row < rows && !failed; row += PASS_ROWS) {
        for (int i = 0; i < count; i++) {
            parts[i] = problems[i];
            parts[i].x += row * parts[i].x_stride * bytes;
            parts[i].y += row * parts[i].y_stride * bytes;
            parts[i].rows = skinny_min(PASS_ROWS, rows - row);
        }
        failed = run_pass(parts, count, useful);
    }
    return failed;
}
