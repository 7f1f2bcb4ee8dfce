/* The linear layer for one instruction set; see tile_template.h. It gives `skinny_run_<ISA>`, and
 * forgets the macros that name it, its target and its multiplication. */
#include "tile_template.h"

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
    skinny_tile tile = {.depth = p->depth, .sums_stride = CHUNK_ROWS};
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

#include "tile_undef.h"
