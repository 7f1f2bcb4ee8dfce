/* The linear layer for one instruction set, see linear_kernels.h: how its products are split, and what becomes of the
 * sums. The instruction set defines
 *
 *   PANEL_ROWS           most rows of x that are multiplied at once
 *   packed_bytes(p)      bytes of one packed row
 *   places_of(pass)      how many places a chunk is read in at once
 *   pack_panels          a step's work: the rows of x, packed
 *   multiply_outputs(pass, p, first, end, sums)  sums[row * CHUNK_ROWS + output - first]
 */

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
    multiply_outputs(pass, p, first, end, sums);
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
    const int64_t part = skinny_parts(end - first, places_of(pass)) * row_bytes;
    if (turn * CACHE_LINE >= part) return;
    for (int64_t place = turn * CACHE_LINE; place < all; place += part) PREFETCH(p->weight + first * row_bytes + place);
}

static int64_t plan_linears(linear_pass *pass, const linear_problem *p, int count, int threads) {
    *pass = (linear_pass){.problems = p, .count = count, .packed_bytes = packed_bytes(p)};
    pass->panel_count = skinny_parts(p->rows, PANEL_ROWS);
    for (int i = 0; i < count; i++) {
        pass->chunk_rows[i] = linear_chunk_rows(p[i].outputs, threads);
        pass->chunks[i] = skinny_parts(p[i].outputs, pass->chunk_rows[i]);
        pass->all_chunks += pass->chunks[i];
    }
    if (linear_threads(p, count, threads) == 1) pass->all_chunks = 1;
    pass->bytes = (threads * p->rows * CHUNK_ROWS + PASS_ROWS) * 4;
    pass->bytes += (p->rows + pass->panel_count) * pass->packed_bytes; /* panels may be filled up to equal ones */
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
