/* The linear layer by register tiles; see tile_template.h. */

/* Columns of a step: x is packed by steps, of which one may be filled up. */
static int64_t step_columns(const linear_problem *p) {
    return p->weight_dtype == SKINNY_ROUNDED ? INT8_STEP : p->weight_dtype == SKINNY_INT4 ? INT4_GROUP : STEP;
}

/* Bytes of a packed row in a step. */
static int64_t step_bytes(const linear_problem *p) {
    if (p->weight_dtype == SKINNY_INT4) return sizeof(int4_x);
    return p->weight_dtype == SKINNY_ROUNDED ? X_STEP_BYTES : STEP_BYTES;
}

/* Panels of x one after another, each as [steps][its rows][a step]: products read them forward. */
static void pack_panels(void *of, int64_t chunk, int thread) {
    const linear_pass *pass = of;
    const linear_problem *p = pass->problems;
    const int64_t row_bytes = p->x_stride * skinny_item_bytes(p->dtype), bytes = step_bytes(p);
    (void)chunk, (void)thread;
    for (int64_t i = 0; i < pass->panel_count; i++) {
        const int64_t start = linear_panel_start(pass, i), end = linear_panel_start(pass, i + 1);
        const int64_t stride = (end - start) * bytes;
        char *to = pass->panels + start * pass->packed_bytes;
        for (int64_t row = start; row < end; row++, to += bytes) {
            const char *from = p->x + row * row_bytes;
            if (p->weight_dtype == SKINNY_ROUNDED)
                pass->x_scales[row] = pack_int8_x(to, stride, from, p->depth, p->dtype);
            else if (p->weight_dtype == SKINNY_INT4)
                pack_int4_x(to, stride, from, p->depth, p->dtype);
            else
                pack_row(to, stride, from, p->depth, p->dtype);
        }
    }
}

/* What the tiles of a chunk share. A single panel reads it in TILE_ROWS places, which the hardware follows, and
 * fetches what stands AHEAD bytes behind each. Several panels read rows that are neighbours and fetch, a part each,
 * what is as far ahead as all that they read: memory is busy while the arithmetic runs from the caches. Memory drops
 * what it is asked for when it is too busy, hence they ask twice. */
static skinny_tile tile_of_chunk(const linear_pass *pass, const linear_problem *p, int64_t apart) {
    const int64_t item_bytes = skinny_item_bytes(p->weight_dtype), row_bytes = p->weight_stride * item_bytes;
    const int64_t read_bytes = step_columns(p) * item_bytes;
    const int two = pass->panel_count < TILE_ROWS && TILE_ROWS * read_bytes > 2 * CACHE_LINE;
    skinny_tile tile = {.last = p->weight + (p->outputs - 1) * row_bytes, .weight_step = apart * row_bytes,
                        .depth = p->depth, .fetch_again = 2 * apart * row_bytes, .fetch_apart = apart * row_bytes,
                        .fetch_step = read_bytes, .sums_stride = CHUNK_ROWS, .sums_step = apart};
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
    const int64_t steps = skinny_parts(p->depth, step_columns(p));
    const int64_t row_bytes = p->weight_stride * skinny_item_bytes(p->weight_dtype);
    skinny_tile tile = tile_of_chunk(pass, p, apart);
    for (int64_t i = 0; i < all; i++) {
        const int64_t row = apart == 1 ? i * TILE_ROWS : i;
        tile.weight = p->weight + (first + row) * row_bytes;
        tile.sums = sums + row;
        tile_row(pass, p, &tile, steps);
    }
}

static void multiply_outputs(const linear_pass *pass, const linear_problem *p, int64_t first, int64_t end,
                             float *sums) {
    (p->weight_dtype == SKINNY_INT4 ? multiply_int4 : multiply_tiles)(pass, p, first, end, sums);
}

static int64_t packed_bytes(const linear_problem *p) { return skinny_parts(p->depth, step_columns(p)) * step_bytes(p); }

/* How many places a chunk is read in at once. */
static int64_t places_of(const linear_pass *pass) { return pass->panel_count == 1 ? TILE_ROWS : 1; }

#include "linear_pass.h"
