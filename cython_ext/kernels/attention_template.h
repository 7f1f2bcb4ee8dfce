/* Attention for one instruction set; see attention_kernels.h and tile_template.h. */

/* The rows of a head, its panels one after another. */
static void pack_head(const attention_pass *pass, int64_t unit) {
    const attention_problem *p = pass->problem;
    const int64_t bytes = skinny_item_bytes(p->dtype);
    for (int64_t i = 0; i < pass->panel_count; i++) {
        const int64_t start = attention_panel_start(pass, i), end = attention_panel_start(pass, i + 1);
        char *panel = pass->panels + (unit * pass->rows + start) * pass->packed_bytes;
        for (int64_t row = start; row < end; row++)
            pack_row(panel + (row - start) * STEP_BYTES, (end - start) * STEP_BYTES,
                     p->query + attention_row(p, p->query_strides, pass->first + unit, row) * bytes,
                     p->depth, p->dtype);
    }
}

/* BLOCK_KEYS keys from `first` times all rows of a head. Past the last key, it is repeated: nobody reads
 * those scores. */
static void score_block(const attention_pass *pass, int64_t unit, int64_t first) {
    const attention_problem *p = pass->problem;
    const int64_t bytes = skinny_item_bytes(p->dtype), end = skinny_min(first + BLOCK_KEYS, p->slots);
    const char *keys = p->key + attention_head(p, p->key_strides, pass->first + unit) * bytes;
    const int64_t key_step = p->key_strides[2] * bytes, ahead = BLOCK_KEYS * key_step;
    skinny_tile tile = {.last = keys + (p->slots - 1) * key_step, .weight_step = key_step, .depth = p->depth,
                        .fetch_step = STEP * bytes, .sums_stride = pass->padded, .sums_step = 1};
    for (int64_t i = 0; i < pass->panel_count; i++) {
        const int64_t start = attention_panel_start(pass, i);
        const int64_t row = unit * pass->rows + start, rows = attention_panel_start(pass, i + 1) - start;
        tile.panel = pass->panels + row * pass->packed_bytes;
        tile.fetch_again = i ? 0 : 2 * key_step;
        tile.fetch_apart = i ? 0 : key_step;
        for (int64_t slot = first; slot < end; slot += TILE_ROWS) {
            tile.weight = keys + slot * key_step;
            tile.fetch = tile.weight + (i ? 0 : ahead);
            tile.sums = pass->scores + row * pass->padded + slot;
            tile_of(rows, p->dtype, &tile);
        }
    }
}

static void pack_heads(void *of, int64_t chunk, int thread) {
    const attention_pass *pass = of;
    (void)chunk, (void)thread;
    for (int64_t unit = 0; unit < pass->count; unit++) pack_head(pass, unit);
}

static void score_chunk(void *of, int64_t chunk, int thread) {
    const attention_pass *pass = of;
    const int64_t slots = pass->problem->slots, chunks = skinny_parts(slots, CHUNK_SLOTS);
    const int64_t end = skinny_min((chunk % chunks + 1) * CHUNK_SLOTS, slots);
    (void)thread;
    for (int64_t slot = chunk % chunks * CHUNK_SLOTS; slot < end; slot += BLOCK_KEYS)
        score_block(pass, chunk / chunks, slot);
}

/* What is added to LANES scores from `slot`; slots past the last one are not seen. */
static ALWAYS_INLINE VEC mask_at(const attention_problem *p, const char *mask, int64_t slot) {
    const int64_t bytes = p->mask_kind == MASK_BOOL ? 1 : skinny_item_bytes(p->dtype);
    const int64_t count = skinny_min(LANES, p->slots - slot);
    char part[LANES * 4] = {0};
    float added[LANES];
    if (count == LANES && p->mask_kind == MASK_NONE) return ZERO();
    if (count == LANES && p->mask_kind == MASK_ADDED)
        return read_lanes(mask + slot * bytes, p->dtype);
    if (p->mask_kind != MASK_NONE && count > 0) memcpy(part, mask + slot * bytes, count * bytes);
    STORE(added, p->mask_kind == MASK_ADDED ? read_lanes(part, p->dtype) : ZERO());
    for (int64_t i = 0; i < LANES; i++)
        if (i >= count || (p->mask_kind == MASK_BOOL && !part[i])) added[i] = -INFINITY;
    return LOAD(added);
}

/* exp(x) of numbers that are not positive, exactly 0 below -87.7: 2^n times Taylor's series of the
 * rest, which lies within ln 2 / 2 of zero. Adding 1.5 * 2^23 rounds to a whole number. */
static ALWAYS_INLINE VEC exp_lanes(VEC x) {
    const VEC magic = SET1(12582912.0f), bounded = MAX(SET1(-88.0f), x);
    const VEC shifted = FMA(bounded, SET1(1.44269504f), magic);
    const VEC n = ADD(shifted, SET1(-12582912.0f));
    /* ln 2 in two parts, the first of which has few enough bits to make the product exact. */
    const VEC rest = FMA(n, SET1(2.12194440e-4f), FMA(n, SET1(-0.693359375f), bounded));
    VEC sum = SET1(1.0f / 5040);
    sum = FMA(sum, rest, SET1(1.0f / 720));
    sum = FMA(sum, rest, SET1(1.0f / 120));
    sum = FMA(sum, rest, SET1(1.0f / 24));
    sum = FMA(sum, rest, SET1(1.0f / 6));
    sum = FMA(sum, rest, SET1(0.5f));
    sum = FMA(sum, rest, SET1(1.0f));
    sum = FMA(sum, rest, SET1(1.0f));
    return FMA(sum, power2(shifted), ZERO());
}

/* Scales and masks a row of scores; returns the maximum, or 0 where everything is masked. */
static float mask_row(const attention_pass *pass, const char *mask, float *scores) {
    const VEC scale = SET1(pass->problem->scale);
    VEC most = SET1(-INFINITY);
    float lanes[LANES], maximum = -INFINITY;
    for (int64_t slot = pass->problem->slots; slot < pass->padded; slot++) scores[slot] = 0;
    for (int64_t slot = 0; slot < pass->padded; slot += LANES) {
        const VEC masked = FMA(LOAD(scores + slot), scale, mask_at(pass->problem, mask, slot));
        STORE(scores + slot, masked);
        most = MAX(masked, most);
    }
    STORE(lanes, most);
    for (int i = 0; i < LANES; i++) maximum = lanes[i] > maximum ? lanes[i] : maximum;
    return maximum > -INFINITY ? maximum : 0;
}

/* Turns a row of scores into weights, not yet divided by their sum. */
static void weigh_row(const attention_pass *pass, int64_t unit, int64_t row) {
    const attention_problem *p = pass->problem;
    const int64_t bytes = p->mask_kind == MASK_BOOL ? 1 : skinny_item_bytes(p->dtype);
    const int64_t place = attention_row(p, p->mask_strides, pass->first + unit, row) * bytes;
    float *scores = pass->scores + (unit * pass->rows + row) * pass->padded;
    const VEC shift = SET1(-mask_row(pass, p->mask ? p->mask + place : NULL, scores));
    for (int64_t slot = 0; slot < pass->padded; slot += LANES)
        STORE(scores + slot, exp_lanes(ADD(LOAD(scores + slot), shift)));
}

/* The sums of WEIGHT_ROWS rows side by side, each in the order of its slots. The last row is repeated
 * for those that are missing. */
static void total_rows(const attention_pass *pass, int64_t first, int64_t count) {
    const float *rows[WEIGHT_ROWS];
    float sums[WEIGHT_ROWS] = {0};
    for (int64_t r = 0; r < WEIGHT_ROWS; r++)
        rows[r] = pass->scores + (first + skinny_min(r, count - 1)) * pass->padded;
    for (int64_t slot = 0; slot < pass->problem->slots; slot++)
        for (int r = 0; r < WEIGHT_ROWS; r++) sums[r] += rows[r][slot];
    for (int64_t r = 0; r < count; r++)
        pass->totals[first + r] = sums[r] == 0 ? 0 : 1 / sums[r];
}

static void weigh_chunk(void *of, int64_t chunk, int thread) {
    const attention_pass *pass = of;
    const int64_t first = chunk * WEIGHT_ROWS, all = pass->count * pass->rows;
    const int64_t count = skinny_min(WEIGHT_ROWS, all - first);
    (void)thread;
    for (int64_t i = first; i < first + count; i++) weigh_row(pass, i / pass->rows, i % pass->rows);
    total_rows(pass, first, count);
}

/* `rows` rows of weights times `slots` values, `stride` floats from one another, added to `sums`,
 * [rows][vectors]. */
static ALWAYS_INLINE void output_tile(const int rows, const int vectors, int64_t slots,
                                      int64_t padded, const float *weights, int64_t stride,
                                      const float *values, float *sums) {
    VEC acc[PANEL_ROWS][TILE_ROWS];
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < vectors; o++) acc[r][o] = LOAD(sums + (r * vectors + o) * LANES);
    for (int64_t slot = 0; slot < slots; slot++, values += stride) {
        VEC value[TILE_ROWS];
        for (int o = 0; o < vectors; o++) value[o] = LOAD(values + o * LANES);
        for (int r = 0; r < rows; r++) {
            const VEC weight = SET1(weights[r * padded + slot]);
            for (int o = 0; o < vectors; o++) acc[r][o] = FMA(value[o], weight, acc[r][o]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < vectors; o++) STORE(sums + (r * vectors + o) * LANES, acc[r][o]);
}

/* The same with both known to the compiler, so that the sums live in registers. */
#define OUTPUT_CASE(many)                                                                   \
    if (are_rows(rows, many)) {                                                             \
        if (vectors == TILE_ROWS)                                                           \
            output_tile(many, TILE_ROWS, slots, padded, weights, stride, values, sums);     \
        else                                                                                \
            output_tile(many, 1, slots, padded, weights, stride, values, sums);             \
    }

static void output_tile_of(int64_t rows, int64_t vectors, int64_t slots, int64_t padded,
                           const float *weights, int64_t stride, const float *values, float *sums) {
    CASES(PANEL_ROWS, OUTPUT_CASE)
}

/* `vectors` vectors of the values of some slots, as float32. */
static void widen_values(const attention_problem *p, const char *values, int64_t slots,
                         int64_t vectors, float *block) {
    const int64_t bytes = skinny_item_bytes(p->dtype), stride = p->value_strides[2] * bytes;
    for (int64_t slot = 0; slot < slots; slot++, values += stride)
        for (int64_t o = 0; o < vectors; o++, block += LANES)
            STORE(block, read_lanes(values + o * LANES * bytes, p->dtype));
}

/* Divides by the sums of the weights and writes `rows` rows from `first`, from `vector` on. */
static void write_rows(const attention_pass *pass, int64_t unit, int64_t first, int64_t rows,
                       int64_t vector, int64_t vectors, const float *sums) {
    const attention_problem *p = pass->problem;
    const int64_t bytes = skinny_item_bytes(p->dtype);
    const int64_t width = p->width, all_heads = p->groups * p->heads;
    const int64_t strides[3] = {p->queries * all_heads * width, width, all_heads * width};
    for (int64_t r = first; r < first + rows; r++) {
        const VEC total = SET1(pass->totals[unit * pass->rows + r]);
        const int64_t row = attention_row(p, strides, pass->first + unit, r) + vector * LANES;
        for (int64_t o = 0; o < vectors; o++, sums += LANES)
            write_lanes(p->out + (row + o * LANES) * bytes, FMA(LOAD(sums), total, ZERO()), p->dtype);
    }
}

/* Panels [panel, last) of a head over `vectors` vectors of the values' width, block by block of slots. A
 * single panel reads float32 where it lies. */
static void output_panels(const attention_pass *pass, int64_t unit, int64_t panel, int64_t last,
                          int64_t vector, int64_t vectors) {
    const attention_problem *p = pass->problem;
    const int64_t bytes = skinny_item_bytes(p->dtype), first = attention_panel_start(pass, panel);
    const int64_t begin = attention_head(p, p->value_strides, pass->first + unit) + vector * LANES;
    const char *values = p->value + begin * bytes;
    const int in_place = p->dtype == SKINNY_FLOAT32 && last - panel == 1;
    const int64_t stride = in_place ? p->value_strides[2] : vectors * LANES;
    float block[BLOCK_VALUES * TILE_ROWS * LANES];
    float sums[BLOCK_PANELS * PANEL_ROWS * TILE_ROWS * LANES] = {0};
    for (int64_t slot = 0; slot < p->slots; slot += BLOCK_VALUES) {
        const int64_t slots = skinny_min(BLOCK_VALUES, p->slots - slot);
        const char *from = values + slot * p->value_strides[2] * bytes;
        if (!in_place) widen_values(p, from, slots, vectors, block);
        for (int64_t i = panel; i < last; i++) {
            const int64_t start = attention_panel_start(pass, i);
            const float *weights = pass->scores + (unit * pass->rows + start) * pass->padded + slot;
            output_tile_of(attention_panel_start(pass, i + 1) - start, vectors, slots, pass->padded,
                           weights, stride, in_place ? (const float *)from : block,
                           sums + (start - first) * vectors * LANES);
        }
    }
    write_rows(pass, unit, first, attention_panel_start(pass, last) - first, vector, vectors, sums);
}

/* Tiles of the width are shared out, and blocks of panels; vectors that fill no tile pass one by one. */
static void output_chunk(void *of, int64_t chunk, int thread) {
    const attention_pass *pass = of;
    const int64_t vectors = pass->problem->width / LANES, tiles = skinny_parts(vectors, TILE_ROWS);
    const int64_t blocks = skinny_parts(pass->panel_count, BLOCK_PANELS);
    const int64_t unit = chunk / blocks / tiles, panel = chunk % blocks * BLOCK_PANELS;
    const int64_t last = skinny_min(panel + BLOCK_PANELS, pass->panel_count);
    const int64_t first = chunk / blocks % tiles * TILE_ROWS, end = skinny_min(first + TILE_ROWS, vectors);
    const int64_t step = end - first == TILE_ROWS ? TILE_ROWS : 1;
    (void)thread;
    for (int64_t vector = first; vector < end; vector += step)
        output_panels(pass, unit, panel, last, vector, step);
}

/* All heads by one thread. */
static void attend_alone(void *of, int64_t chunk, int thread) {
    const attention_pass *pass = of;
    const int64_t vectors = pass->problem->width / LANES;
    const int64_t phases[3] = {
        pass->count * skinny_parts(pass->problem->slots, CHUNK_SLOTS),
        skinny_parts(pass->count * pass->rows, WEIGHT_ROWS),
        pass->count * skinny_parts(vectors, TILE_ROWS) * skinny_parts(pass->panel_count, BLOCK_PANELS),
    };
    (void)chunk;
    pack_heads(of, 0, thread);
    for (int64_t i = 0; i < phases[0]; i++) score_chunk(of, i, thread);
    for (int64_t i = 0; i < phases[1]; i++) weigh_chunk(of, i, thread);
    for (int64_t i = 0; i < phases[2]; i++) output_chunk(of, i, thread);
}

static int64_t plan_attention(attention_pass *pass, const attention_problem *p, int threads) {
    *pass = (attention_pass){.problem = p, .rows = p->heads * p->queries};
    pass->padded = skinny_parts(p->slots, SLOT_MULTIPLE) * SLOT_MULTIPLE;
    pass->packed_bytes = skinny_parts(p->depth, STEP) * STEP_BYTES;
    pass->panel_count = skinny_parts(pass->rows, PANEL_ROWS);
    const int64_t head_bytes = pass->rows * pass->packed_bytes + pass->rows * (pass->padded + 1) * 4;
    pass->count = skinny_min(p->batch * p->groups, threads * SCORE_BYTES / head_bytes + 1);
    return pass->count * head_bytes;
}

static void add_attention(work_step *steps, attention_pass *pass, char *memory, int threads) {
    const attention_problem *p = pass->problem;
    const int64_t tiles = skinny_parts(p->width / LANES, TILE_ROWS);
    pass->scores = (float *)memory;
    pass->panels = (char *)(pass->scores + pass->count * pass->rows * pass->padded);
    pass->totals = (float *)(pass->panels + pass->count * pass->rows * pass->packed_bytes);
    for (int i = 0; i < ATTENTION_STEPS; i++) steps[i] = (work_step){.of = pass};
    if (threads == 1) {
        steps[0].work = attend_alone, steps[0].chunks = 1;
        return;
    }
    steps[0].work = pack_heads, steps[0].chunks = 1;
    steps[1].work = score_chunk, steps[1].chunks = pass->count * skinny_parts(p->slots, CHUNK_SLOTS);
    steps[2].work = weigh_chunk, steps[2].chunks = skinny_parts(pass->count * pass->rows, WEIGHT_ROWS);
    steps[3].work = output_chunk;
    steps[3].chunks = pass->count * tiles * skinny_parts(pass->panel_count, BLOCK_PANELS);
}
