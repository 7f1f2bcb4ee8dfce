/* The linear layer for one instruction set; see linear_kernels.h and tile_template.h. */

/* Panels of x one after another, each as [steps][its rows][STEP]: a tile reads them forward. */
static void pack_panels(void *of, int64_t chunk, int thread) {
    const linear_pass *pass = of;
    const linear_problem *p = pass->problems;
    const int64_t row_bytes = p->x_stride * skinny_item_bytes(p->dtype);
    (void)chunk, (void)thread;
    if (p->weight_dtype == SKINNY_ROUNDED) {
        pack_x_panels(pass);
        return;
    }
    if (p->weight_dtype == SKINNY_INT4) {
        pack_int4_x(pass);
        return;
    }
    for (int64_t i = 0; i < pass->panel_count; i++) {
        const int64_t start = linear_panel_start(pass, i), end = linear_panel_start(pass, i + 1);
        char *panel = pass->panels + start * pass->packed_bytes;
        for (int64_t row = start; row < end; row++)
            pack_row(panel + (row - start) * STEP_BYTES, (end - start) * STEP_BYTES,
                     p->x + row * row_bytes, p->depth, p->dtype);
    }
}

/* What the tiles of a chunk share. A single panel reads it in TILE_ROWS places, which the hardware follows, and
 * fetches what stands AHEAD bytes behind each. Several panels read rows that are neighbours and fetch, a part each,
 * what is as far ahead as all that they read: memory is busy while the arithmetic runs from the caches. Memory drops
 * what it is asked for when it is too busy, hence they ask twice. */
static skinny_tile tile_of_chunk(const linear_pass *pass, const linear_problem *p, int64_t apart) {
    const int64_t item_bytes = skinny_item_bytes(p->weight_dtype), row_bytes = p->weight_stride * item_bytes;
    const int64_t step_bytes = p->weight_dtype == SKINNY_ROUNDED ? INT8_STEP : STEP * item_bytes;
    const int two = pass->panel_count < TILE_ROWS && TILE_ROWS * step_bytes > 2 * CACHE_LINE;
    skinny_tile tile = {.last = p->weight + (p->outputs - 1) * row_bytes, .weight_step = apart * row_bytes,
                        .depth = p->depth, .fetch_again = 2 * apart * row_bytes, .fetch_apart = apart * row_bytes,
                        .fetch_step = step_bytes, .sums_stride = CHUNK_ROWS, .sums_step = apart};
    if (pass->panel_count > 1) {
        tile.fetch_again = FETCHED_AGAIN;
        tile.fetch_apart = two ? CACHE_LINE : 0;
        tile.fetch_step = CACHE_LINE + tile.fetch_apart;
    }
    return tile;
}

/* All panels times TILE_ROWS weight rows. */
static void tile_row(const linear_pass *pass, const linear_problem *p, skinny_tile *tile, int64_t steps) {
    const int64_t tile_bytes = TILE_ROWS * tile->weight_step, panel_bytes = steps * tile->fetch_step;
    const int64_t ahead = pass->panel_count == 1 ? AHEAD : skinny_most(tile_bytes, LEAST_AHEAD);
    float *sums = tile->sums;
    for (int64_t i = 0, start = 0, end; i < pass->panel_count; i++, start = end) {
        const int64_t fetched = i * panel_bytes;
        end = linear_panel_start(pass, i + 1);
        tile->panel = pass->panels + start * pass->packed_bytes;
        tile->fetch = tile->weight + (fetched < tile_bytes ? ahead + fetched : 0); /* 0: what the caches have */
        tile->sums = sums + start * CHUNK_ROWS;
        if (p->weight_dtype == SKINNY_ROUNDED)
            int8_tile_of(end - start, tile);
        else
            tile_of(end - start, p->weight_dtype, tile);
    }
}

/* Tiles of the outputs [first, end). Places past the last weight row repeat it: nobody reads those sums. */
static void multiply_tiles(const linear_pass *pass, const linear_problem *p, int64_t first, int64_t end, float *sums) {
    const int64_t all = skinny_parts(end - first, TILE_ROWS), apart = pass->panel_count == 1 ? all : 1;
    const int64_t steps = skinny_parts(p->depth, p->weight_dtype == SKINNY_ROUNDED ? INT8_STEP : STEP);
    const int64_t row_bytes = p->weight_stride * skinny_item_bytes(p->weight_dtype);
    skinny_tile tile = tile_of_chunk(pass, p, apart);
    for (int64_t i = 0; i < all; i++) {
        const int64_t row = apart == 1 ? i * TILE_ROWS : i;
        tile.weight = p->weight + (first + row) * row_bytes;
        tile.sums = sums + row;
        tile_row(pass, p, &tile, steps);
    }
}

/* Elements [o, o + count) of one for each output, and zeros behind them; zeros of none. */
static ALWAYS_INLINE VEC of_outputs(const char *all, int64_t o, int64_t count, int dtype) {
    const int64_t bytes = skinny_item_bytes(dtype);
    char part[LANES * 4] = {0};
    if (all && count == LANES) return read_lanes(all + o * bytes, dtype);
    if (all) memcpy(part, all + o * bytes, count * bytes);
    return read_lanes(part, dtype);
}

/* Sums, in their scales, plus bias for outputs [o, o + count), count <= LANES, rounded once to the output's
 * dtype. */
static void write_outputs(const linear_pass *pass, const linear_problem *p, int64_t o, int64_t count,
                          const float *sums) {
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

/* The problem that a chunk of a pass belongs to; its first weight row is written to `first`, and the row
 * behind its last one to `end`. */
static const linear_problem *problem_of(const linear_pass *pass, int64_t chunk, int64_t *first, int64_t *end) {
    int i = 0;
    while (chunk >= pass->chunks[i]) chunk -= pass->chunks[i++];
    *first = chunk * pass->chunk_rows[i];
    *end = skinny_min(*first + pass->chunk_rows[i], pass->problems[i].outputs);
    return pass->problems + i;
}

static void multiply_chunk(void *of, int64_t chunk, int thread) {
    const linear_pass *pass = of;
    int64_t first, end;
    const linear_problem *p = problem_of(pass, chunk, &first, &end);
    float *sums = pass->sums + thread * p->rows * CHUNK_ROWS;
    if (p->weight_dtype == SKINNY_INT4)
        multiply_int4(pass, p, first, end, sums);
    else
        multiply_tiles(pass, p, first, end, sums);
    for (int64_t o = 0; o < end - first; o += LANES)
        write_outputs(pass, p, first + o, skinny_min(LANES, end - first - o), sums + o);
}

static void multiply_all(void *of, int64_t chunk, int thread) {
    const linear_pass *pass = of;
    (void)chunk;
    for (int64_t i = 0, before = 0; i < pass->count; before += pass->chunks[i++])
        for (int64_t j = 0; j < pass->chunks[i]; j++) multiply_chunk(of, before + j, thread);
}

/* The turn-th cache line of each place that a chunk is read in. */
static void fetch_chunk(void *of, int64_t chunk, int64_t turn) {
    const linear_pass *pass = of;
    int64_t first, end;
    const linear_problem *p = problem_of(pass, chunk, &first, &end);
    const int64_t row_bytes = p->weight_stride * skinny_item_bytes(p->weight_dtype), all = (end - first) * row_bytes;
    const int64_t part = pass->panel_count == 1 ? skinny_parts(end - first, TILE_ROWS) * row_bytes : all;
    if (turn * CACHE_LINE >= part) return;
    for (int64_t place = turn * CACHE_LINE; place < all; place += part) PREFETCH(p->weight + first * row_bytes + place);
}

static int64_t plan_linears(linear_pass *pass, const linear_problem *p, int count, int threads) {
    *pass = (linear_pass){.problems = p, .count = count};
    if (p->weight_dtype == SKINNY_ROUNDED)
        pass->packed_bytes = skinny_parts(p->depth, INT8_STEP) * X_STEP_BYTES;
    else if (p->weight_dtype == SKINNY_INT4)
        pass->packed_bytes = skinny_parts(p->depth, INT4_GROUP) * (int64_t)sizeof(int4_x);
    else
        pass->packed_bytes = skinny_parts(p->depth, STEP) * STEP_BYTES;
    pass->panel_count = skinny_parts(p->rows, PANEL_ROWS);
    for (int i = 0; i < count; i++) {
        pass->chunk_rows[i] = linear_chunk_rows(p[i].outputs, threads);
        pass->chunks[i] = skinny_parts(p[i].outputs, pass->chunk_rows[i]);
        pass->all_chunks += pass->chunks[i];
    }
    if (linear_threads(p, count, threads) == 1) pass->all_chunks = 1;
    pass->bytes = (threads * p->rows * CHUNK_ROWS + PASS_ROWS) * 4 + p->rows * pass->packed_bytes;
    return pass->bytes;
}

static void add_linears(work_step *steps, linear_pass *pass, char *memory, int threads) {
    pass->sums = (float *)memory;
    pass->x_scales = pass->sums + threads * pass->problems->rows * CHUNK_ROWS;
    pass->panels = (char *)(pass->x_scales + PASS_ROWS);
    steps[0] = (work_step){.work = pack_panels, .of = pass, .chunks = 1};
    steps[1] = (work_step){.work = multiply_all, .of = pass, .chunks = 1};
    if (pass->all_chunks > 1)
        steps[1] = (work_step){multiply_chunk, fetch_chunk, pass, pass->all_chunks};
}
