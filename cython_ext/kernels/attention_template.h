/* Attention for one instruction set; see attention_kernels.h and tile_template.h. */

/* The rows of every head, a head's panels one after another. */
TARGET static void NAMED(pack_queries)(const attention_pass *pass) {
    const attention_problem *p = pass->problem;
    const int64_t bytes = skinny_item_bytes(p->dtype);
    for (int64_t i = 0; i < pass->count * pass->panel_count; i++) {
        const int64_t unit = i / pass->panel_count, part = i % pass->panel_count;
        const int64_t start = attention_panel_start(pass, part);
        const int64_t end = attention_panel_start(pass, part + 1);
        char *panel = pass->panels + (unit * pass->rows + start) * pass->packed_bytes;
        for (int64_t row = start; row < end; row++)
            NAMED(pack_row)(panel + (row - start) * STEP_BYTES, (end - start) * STEP_BYTES,
                            p->query + attention_row(p, p->query_strides, pass->first + unit, row) * bytes,
                            p->depth, p->dtype);
    }
}

/* TILE_ROWS keys from `slot` times all rows of a head. Past the last key, it is repeated: nobody
 * reads those scores. */
TARGET static void NAMED(score_slots)(const attention_pass *pass, int64_t unit, int64_t slot) {
    const attention_problem *p = pass->problem;
    const int64_t bytes = skinny_item_bytes(p->dtype);
    const char *keys = p->key + attention_head(p, p->key_strides, pass->first + unit) * bytes;
    skinny_tile tile = {.depth = p->depth, .sums_stride = pass->padded, .sums_step = 1};
    for (int o = 0; o < TILE_ROWS; o++)
        tile.weight[o] = keys + skinny_min(slot + o, p->slots - 1) * p->key_strides[2] * bytes;
    for (int64_t i = 0; i < pass->panel_count; i++) {
        const int64_t start = attention_panel_start(pass, i), end = attention_panel_start(pass, i + 1);
        const int64_t row = unit * pass->rows + start;
        tile.panel = pass->panels + row * pass->packed_bytes;
        tile.sums = pass->scores + row * pass->padded + slot;
        NAMED(tile_of)(end - start, p->dtype, tile);
    }
}

TARGET static void NAMED(score_work)(void *shared) {
    attention_pass *pass = shared;
    const int64_t slots = pass->problem->slots;
    const int64_t chunks = (slots + CHUNK_SLOTS - 1) / CHUNK_SLOTS;
    int64_t i;
    while ((i = FETCH_ADD(&pass->next)) < pass->count * chunks) {
        const int64_t first = i % chunks * CHUNK_SLOTS;
        const int64_t end = skinny_min(first + CHUNK_SLOTS, slots);
        for (int64_t slot = first; slot < end; slot += TILE_ROWS)
            NAMED(score_slots)(pass, i / chunks, slot);
    }
}

/* What is added to LANES scores from `slot`; slots past the last one are not seen. */
TARGET static ALWAYS_INLINE VEC NAMED(mask_at)(const attention_problem *p, const char *mask,
                                               int64_t slot) {
    const int64_t bytes = p->mask_kind == MASK_BOOL ? 1 : skinny_item_bytes(p->dtype);
    const int64_t count = skinny_min(LANES, p->slots - slot);
    char part[LANES * 4] = {0};
    float added[LANES];
    if (count == LANES && p->mask_kind == MASK_NONE) return ZERO();
    if (count == LANES && p->mask_kind == MASK_ADDED)
        return NAMED(read)(mask + slot * bytes, p->dtype);
    if (p->mask_kind != MASK_NONE && count > 0) memcpy(part, mask + slot * bytes, count * bytes);
    STORE(added, p->mask_kind == MASK_ADDED ? NAMED(read)(part, p->dtype) : ZERO());
    for (int64_t i = 0; i < LANES; i++)
        if (i >= count || (p->mask_kind == MASK_BOOL && !part[i])) added[i] = -INFINITY;
    return LOAD(added);
}

/* exp(x) of numbers that are not positive, exactly 0 below -87.7: 2^n times Taylor's series of the
 * rest, which lies within ln 2 / 2 of zero. Adding 1.5 * 2^23 rounds to a whole number. */
TARGET static ALWAYS_INLINE VEC NAMED(exp)(VEC x) {
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
    return FMA(sum, POWER2(shifted), ZERO());
}

/* Scales and masks a row of scores; returns the maximum, or 0 where everything is masked. */
TARGET static float NAMED(mask_row)(const attention_pass *pass, const char *mask, float *scores) {
    const VEC scale = SET1(pass->problem->scale);
    VEC most = SET1(-INFINITY);
    float lanes[LANES], maximum = -INFINITY;
    for (int64_t slot = pass->problem->slots; slot < pass->padded; slot++) scores[slot] = 0;
    for (int64_t slot = 0; slot < pass->padded; slot += LANES) {
        const VEC masked = FMA(LOAD(scores + slot), scale, NAMED(mask_at)(pass->problem, mask, slot));
        STORE(scores + slot, masked);
        most = MAX(masked, most);
    }
    STORE(lanes, most);
    for (int i = 0; i < LANES; i++) maximum = lanes[i] > maximum ? lanes[i] : maximum;
    return maximum > -INFINITY ? maximum : 0;
}

/* Turns a row of scores into weights, not yet divided by their sum. */
TARGET static void NAMED(weigh_row)(const attention_pass *pass, int64_t unit, int64_t row) {
    const attention_problem *p = pass->problem;
    const int64_t bytes = p->mask_kind == MASK_BOOL ? 1 : skinny_item_bytes(p->dtype);
    const int64_t place = attention_row(p, p->mask_strides, pass->first + unit, row) * bytes;
    float *scores = pass->scores + (unit * pass->rows + row) * pass->padded;
    const VEC shift = SET1(-NAMED(mask_row)(pass, p->mask ? p->mask + place : NULL, scores));
    for (int64_t slot = 0; slot < pass->padded; slot += LANES)
        STORE(scores + slot, NAMED(exp)(ADD(LOAD(scores + slot), shift)));
}

/* The sums of WEIGHT_ROWS rows side by side, each in the order of its slots. The last row is repeated
 * for those that are missing. */
TARGET static void NAMED(total_rows)(const attention_pass *pass, int64_t first, int64_t count) {
    const float *rows[WEIGHT_ROWS];
    float sums[WEIGHT_ROWS] = {0};
    for (int64_t r = 0; r < WEIGHT_ROWS; r++)
        rows[r] = pass->scores + (first + skinny_min(r, count - 1)) * pass->padded;
    for (int64_t slot = 0; slot < pass->problem->slots; slot++)
        for (int r = 0; r < WEIGHT_ROWS; r++) sums[r] += rows[r][slot];
    for (int64_t r = 0; r < count; r++)
        pass->totals[first + r] = sums[r] == 0 ? 0 : 1 / sums[r];
}

TARGET static void NAMED(weight_work)(void *shared) {
    attention_pass *pass = shared;
    const int64_t all = pass->count * pass->rows;
    int64_t first;
    while ((first = FETCH_ADD(&pass->next) * WEIGHT_ROWS) < all) {
        const int64_t count = skinny_min(WEIGHT_ROWS, all - first);
        for (int64_t i = first; i < first + count; i++)
            NAMED(weigh_row)(pass, i / pass->rows, i % pass->rows);
        NAMED(total_rows)(pass, first, count);
    }
}

/* `rows` rows of weights times `vectors` vectors of the values' width, from row `first`. */
TARGET static ALWAYS_INLINE void NAMED(output_tile)(const int rows, const int vectors, const int dtype,
                                                    const attention_pass *pass, const char *values,
                                                    const float *weights,
                                                    VEC acc[PANEL_ROWS][TILE_ROWS]) {
    const int64_t bytes = skinny_item_bytes(dtype);
    const int64_t stride = pass->problem->value_strides[2] * bytes;
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < vectors; o++) acc[r][o] = ZERO();
    for (int64_t slot = 0; slot < pass->problem->slots; slot++, values += stride) {
        VEC weight[PANEL_ROWS];
        for (int r = 0; r < rows; r++) weight[r] = SET1(weights[r * pass->padded + slot]);
        for (int o = 0; o < vectors; o++) {
            const VEC value = NAMED(read)(values + o * LANES * bytes, dtype);
            for (int r = 0; r < rows; r++) acc[r][o] = FMA(value, weight[r], acc[r][o]);
        }
    }
}

/* Divides by the sum of the weights and writes. `place`: bytes from the start of a row of values. */
TARGET static ALWAYS_INLINE void NAMED(write_tile)(const int rows, const int vectors, const int dtype,
                                                   const attention_pass *pass, int64_t unit,
                                                   int64_t first, int64_t place,
                                                   VEC acc[PANEL_ROWS][TILE_ROWS]) {
    const attention_problem *p = pass->problem;
    const int64_t bytes = skinny_item_bytes(dtype);
    const int64_t width = p->width, all_heads = p->groups * p->heads;
    const int64_t strides[3] = {p->queries * all_heads * width, width, all_heads * width};
    for (int r = 0; r < rows; r++) {
        const VEC total = SET1(pass->totals[unit * pass->rows + first + r]);
        const int64_t row = attention_row(p, strides, pass->first + unit, first + r);
        for (int o = 0; o < vectors; o++)
            NAMED(write)(p->out + row * bytes + place + o * LANES * bytes,
                         FMA(acc[r][o], total, ZERO()), dtype);
    }
}

#define OUTPUT_CASE(rows, dtype)                                                            \
    case rows:                                                                              \
        NAMED(output_tile)(rows, vectors, dtype, pass, values, weights, acc);               \
        NAMED(write_tile)(rows, vectors, dtype, pass, unit, first, place, acc);             \
        break;

/* All rows of a head over `vectors` vectors of the values' width. */
TARGET static ALWAYS_INLINE void NAMED(output_rows)(const int vectors, const int dtype,
                                                    const attention_pass *pass, int64_t unit,
                                                    int64_t place) {
    const attention_problem *p = pass->problem;
    const int64_t begin = attention_head(p, p->value_strides, pass->first + unit);
    const char *values = p->value + begin * skinny_item_bytes(dtype) + place;
    VEC acc[PANEL_ROWS][TILE_ROWS];
    for (int64_t i = 0; i < pass->panel_count; i++) {
        const int64_t first = attention_panel_start(pass, i);
        const float *weights = pass->scores + (unit * pass->rows + first) * pass->padded;
        switch (attention_panel_start(pass, i + 1) - first) {
            OUTPUT_CASE(1, dtype)
            OUTPUT_CASE(2, dtype)
#if PANEL_ROWS >= 3
            OUTPUT_CASE(3, dtype)
#endif
#if PANEL_ROWS >= 4
            OUTPUT_CASE(4, dtype)
#endif
#if PANEL_ROWS >= 5
            OUTPUT_CASE(5, dtype)
#endif
#if PANEL_ROWS >= 6
            OUTPUT_CASE(6, dtype)
#endif
        }
    }
}

/* The same with both known to the compiler, so that the sums live in registers; the few vectors that
 * fill no tile pass one by one. */
TARGET static void NAMED(outputs_of)(const attention_pass *pass, int64_t unit, int64_t place,
                                     int64_t vectors) {
    const int dtype = pass->problem->dtype;
    if (vectors != TILE_ROWS)
        NAMED(output_rows)(1, dtype, pass, unit, place);
    else if (dtype == SKINNY_FLOAT32)
        NAMED(output_rows)(TILE_ROWS, SKINNY_FLOAT32, pass, unit, place);
    else if (dtype == SKINNY_BFLOAT16)
        NAMED(output_rows)(TILE_ROWS, SKINNY_BFLOAT16, pass, unit, place);
    else
        NAMED(output_rows)(TILE_ROWS, SKINNY_FLOAT16, pass, unit, place);
}

TARGET static void NAMED(output_work)(void *shared) {
    attention_pass *pass = shared;
    const int64_t vector_bytes = LANES * skinny_item_bytes(pass->problem->dtype);
    const int64_t vectors = pass->problem->width / LANES;
    const int64_t tiles = (vectors + TILE_ROWS - 1) / TILE_ROWS;
    int64_t i;
    while ((i = FETCH_ADD(&pass->next)) < pass->count * tiles) {
        const int64_t first = i % tiles * TILE_ROWS;
        const int64_t end = skinny_min(first + TILE_ROWS, vectors);
        const int64_t step = end - first == TILE_ROWS ? TILE_ROWS : 1;
        for (int64_t vector = first; vector < end; vector += step)
            NAMED(outputs_of)(pass, i / tiles, vector * vector_bytes, step);
    }
}

TARGET static void NAMED(run_phases)(attention_pass *pass, int threads) {
    openmp_work phases[3] = {NAMED(score_work), NAMED(weight_work), NAMED(output_work)};
    NAMED(pack_queries)(pass);
    for (int i = 0; i < 3; i++) {
        pass->next = 0;
        openmp_parallel(phases[i], pass, threads);
    }
}

/* Returns 0, or -1 when memory ran out. */
TARGET static int NAMED(attention)(const attention_problem *p, int threads) {
    attention_pass pass = {.problem = p, .rows = p->heads * p->queries};
    pass.padded = (p->slots + SLOT_MULTIPLE - 1) / SLOT_MULTIPLE * SLOT_MULTIPLE;
    pass.packed_bytes = (p->depth + STEP - 1) / STEP * STEP_BYTES;
    pass.panel_count = (pass.rows + PANEL_ROWS - 1) / PANEL_ROWS;
    const int64_t row_bytes = pass.padded * 4 + pass.packed_bytes + 4;
    const int64_t heads = p->batch * p->groups;
    const int64_t share = skinny_min(heads, SCORE_BYTES / (pass.rows * row_bytes) + 1);
    const int64_t products = share * pass.rows * p->slots * (p->depth + p->width);
    const int useful = (int)skinny_min(threads, products / THREAD_PRODUCTS + 1);
    char *memory = malloc(share * pass.rows * row_bytes + CACHE_LINE);
    if (!memory) return -1;
    pass.scores = (float *)(memory + (CACHE_LINE - (uintptr_t)memory % CACHE_LINE));
    pass.panels = (char *)(pass.scores + share * pass.rows * pass.padded);
    pass.totals = (float *)(pass.panels + share * pass.rows * pass.packed_bytes);
    for (; pass.first < heads; pass.first += share) {
        pass.count = skinny_min(share, heads - pass.first);
        NAMED(run_phases)(&pass, useful);
    }
    free(memory);
    return 0;
}
