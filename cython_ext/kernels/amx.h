/* AMX: 32 weight rows times up to 16 input rows, or 16 times up to 64, 32 bfloat16 at a time; keys of
 * attention, of which there are fewer, always 16. A tile of weights is read as it lies in memory; the
 * input rows are packed so that a tile holds 16 of them, two neighbours of the depth side by side. Its
 * sums run along the depth two by two, one accumulator each, and take subnormal numbers for zero. */
#include <sys/syscall.h>

long syscall(long number, ...); /* which strict C hides */

/* The operating system lends the tiles to a process that asks, once. */
static int skinny_cpu_has_amx(void) {
    const unsigned int tile = 1u << 24, bfloat16 = 1u << 22;
    const long request = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    unsigned int a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || ~d & (tile | bfloat16)) return 0;
    return skinny_cpu_has_avx512bf16() && syscall(SYS_arch_prctl, request, tile_data) == 0;
}

/* Compilers need not know how much of memory the instructions for tiles read. */
#define TILES_READ(address) __asm__ volatile("" ::"r"(address) : "memory")

#define ISA amx
#define TARGET __attribute__((target("amx-tile,amx-bf16,avx512bf16,avx512f,avx512bw,avx2,fma,f16c")))
#define PACKED_DTYPE SKINNY_BFLOAT16
#define OWN_TILES
#define AMX_ROWS 16 /* of x or of the weights in one tile */
#define PANEL_COUNT(rows) (((rows) + AMX_ROWS - 1) / AMX_ROWS)
#define PACKED_ROWS(rows) (PANEL_COUNT(rows) * AMX_ROWS)
#define BEGIN_THREAD() skinny_begin_amx()
#define END_THREAD() _tile_release()
#include "tile_template.h"

/* All tiles have 16 lines of 64 bytes. */
TARGET static void skinny_begin_amx(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t line_bytes[16];
        uint8_t lines[16];
    } tiles = {.palette = 1};
    for (int i = 0; i < 8; i++) tiles.line_bytes[i] = CACHE_LINE, tiles.lines[i] = AMX_ROWS;
    TILES_READ(&tiles);
    _tile_loadconfig(&tiles);
}

/* The first `count` columns of a tile, each `stride` from the last. */
TARGET static ALWAYS_INLINE void NAMED(write_columns)(const float *tile, float *to, int64_t stride,
                                                      int64_t count) {
    __m512 a[AMX_ROWS], b[AMX_ROWS];
    for (int i = 0; i < AMX_ROWS; i++) a[i] = LOAD(tile + i * AMX_ROWS);
    for (int i = 0; i < AMX_ROWS; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
    /* a[4 q + c]: of every four columns the c-th, in rows 4 q to 4 q + 3. */
    for (int i = 0; i < AMX_ROWS; i += 4)
        for (int half = 0; half < 2; half++) {
            const __m512d upper = _mm512_castps_pd(b[i + half]), lower = _mm512_castps_pd(b[i + 2 + half]);
            a[i + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(upper, lower));
            a[i + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(upper, lower));
        }
    for (int c = 0; c < 4; c++) {
        const __m512 first_low = _mm512_shuffle_f32x4(a[c], a[4 + c], 0x44);
        const __m512 first_high = _mm512_shuffle_f32x4(a[c], a[4 + c], 0xee);
        const __m512 last_low = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0x44);
        const __m512 last_high = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0xee);
        b[c] = _mm512_shuffle_f32x4(first_low, last_low, 0x88);
        b[4 + c] = _mm512_shuffle_f32x4(first_low, last_low, 0xdd);
        b[8 + c] = _mm512_shuffle_f32x4(first_high, last_high, 0x88);
        b[12 + c] = _mm512_shuffle_f32x4(first_high, last_high, 0xdd);
    }
    for (int i = 0; i < AMX_ROWS; i++)
        if (i < count) STORE(to + i * stride, b[i]);
}

/* Up to AMX_ROWS rows as a panel [steps][AMX_ROWS pairs][AMX_ROWS rows][2]; zeros where x ends. */
TARGET static void NAMED(pack_panel)(char *panel, const char *const *rows, int64_t count, int64_t depth) {
    char part[AMX_ROWS * CACHE_LINE] = {0};
    for (int64_t k = 0; k < depth; k += STEP, panel += AMX_ROWS * CACHE_LINE) {
        const int64_t bytes = skinny_min(STEP, depth - k) * 2;
        if (bytes < CACHE_LINE) memset(part, 0, sizeof(part));
        for (int64_t r = 0; r < count; r++) memcpy(part + r * CACHE_LINE, rows[r] + k * 2, bytes);
        NAMED(write_columns)((const float *)part, (float *)panel, AMX_ROWS, AMX_ROWS);
    }
}

TARGET static void NAMED(pack_panels)(char *panels, const linear_pass *pass) {
    const linear_problem *p = pass->problem;
    const char *rows[AMX_ROWS];
    for (int64_t start = 0; start < p->rows; start += AMX_ROWS) {
        const int64_t count = skinny_min(AMX_ROWS, p->rows - start);
        for (int64_t r = 0; r < count; r++) rows[r] = p->x + (start + r) * p->x_stride * 2;
        NAMED(pack_panel)(panels + start * pass->packed_bytes, rows, count, p->depth);
    }
}

/* What there is of the weights' tile at (first, k), in front of zeros. */
TARGET static void NAMED(part_tile)(const linear_problem *p, int64_t first, int64_t k, char *part) {
    const int64_t rows = skinny_min(AMX_ROWS, p->outputs - first);
    const int64_t bytes = skinny_min(STEP, p->depth - k) * 2;
    memset(part, 0, AMX_ROWS * CACHE_LINE);
    for (int64_t r = 0; r < rows; r++)
        memcpy(part + r * CACHE_LINE, p->weight + ((first + r) * p->weight_stride + k) * 2, bytes);
}

/* Tile registers: sums in 0 to 3, weights in 4 and 5, x in 6 and 7. */
#define AMX_WEIGHTS(group, tile)                                                            \
    if (groups > group) {                                                                   \
        if (whole && k + STEP <= p->depth) {                                                \
            _tile_loadd(tile, weight + group * AMX_ROWS * row_bytes + k * 2, row_bytes);    \
        } else {                                                                            \
            NAMED(part_tile)(p, first + group * AMX_ROWS, k, part);                         \
            TILES_READ(part);                                                               \
            _tile_loadd(tile, part, CACHE_LINE);                                            \
        }                                                                                   \
    }
#define AMX_PANEL(i, tile)                                                                  \
    if (panels > i) {                                                                       \
        _tile_loadd(tile, x + i * panel_bytes, CACHE_LINE);                                 \
        _tile_dpbf16ps(i, 4, tile);                                                         \
    }

/* `groups` times AMX_ROWS weight rows from `first`, times 16 to 64 input rows; one of the two is one. The
 * hardware follows so many streams by itself: fetching in software what lies ahead made it slower. */
TARGET static ALWAYS_INLINE void NAMED(tiles)(const int panels, const int groups,
                                              const linear_pass *pass, int64_t first,
                                              float *sums) {
    const linear_problem *p = pass->problem;
    const int64_t row_bytes = p->weight_stride * 2, panel_bytes = AMX_ROWS * pass->packed_bytes;
    const char *weight = p->weight + first * row_bytes, *x = pass->panels;
    const int whole = first + groups * AMX_ROWS <= p->outputs;
    char part[AMX_ROWS * CACHE_LINE];
    TILES_READ(x);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < p->depth; k += STEP, x += AMX_ROWS * CACHE_LINE) {
        AMX_WEIGHTS(0, 4)
        AMX_WEIGHTS(1, 5)
        AMX_PANEL(0, 6)
        if (groups > 1) _tile_dpbf16ps(1, 5, 6);
        AMX_PANEL(1, 7)
        AMX_PANEL(2, 6)
        AMX_PANEL(3, 7)
    }
    _tile_stored(0, sums, CACHE_LINE);
    if (panels + groups > 2) _tile_stored(1, sums + 256, CACHE_LINE);
    if (panels > 2) _tile_stored(2, sums + 512, CACHE_LINE);
    if (panels > 3) _tile_stored(3, sums + 768, CACHE_LINE);
}

/* The same with both known to the compiler. */
TARGET static void NAMED(tiles_of)(const linear_pass *pass, int64_t groups, int64_t first, float *sums) {
    if (groups == 2) return NAMED(tiles)(1, 2, pass, first, sums);
    switch (pass->panel_count) {
        case 1: NAMED(tiles)(1, 1, pass, first, sums); break;
        case 2: NAMED(tiles)(2, 1, pass, first, sums); break;
        case 3: NAMED(tiles)(3, 1, pass, first, sums); break;
        default: NAMED(tiles)(4, 1, pass, first, sums);
    }
}

/* The same into rows of CHUNK_ROWS sums: tiles hold them as [panels or groups][AMX_ROWS][AMX_ROWS].
 * Returns how many weight rows that were. */
TARGET static int64_t NAMED(tile_row)(const linear_pass *pass, int64_t first, float *sums) {
    const int64_t groups = pass->panel_count == 1 ? 2 : 1;
    float tiles[PASS_ROWS * AMX_ROWS];
    NAMED(tiles_of)(pass, groups, first, tiles);
    for (int64_t group = 0; group < groups; group++)
        for (int64_t row = 0; row < pass->problem->rows; row += AMX_ROWS)
            NAMED(write_columns)(tiles + (row / AMX_ROWS + group) * AMX_ROWS * AMX_ROWS,
                                 sums + row * CHUNK_ROWS + group * AMX_ROWS, CHUNK_ROWS,
                                 pass->problem->rows - row);
    return groups * AMX_ROWS;
}

TARGET static void NAMED(chunk)(const linear_pass *pass, int64_t first, int64_t count, float *sums) {
    for (int64_t o = 0; o < count;) o += NAMED(tile_row)(pass, first + o, sums + o);
}

/* The rows of a head, packed as those of a linear layer. */
TARGET static void NAMED(pack_head)(const attention_pass *pass, int64_t unit) {
    const attention_problem *p = pass->problem;
    char *panels = pass->panels + unit * PACKED_ROWS(pass->rows) * pass->packed_bytes;
    const char *rows[AMX_ROWS];
    for (int64_t start = 0; start < pass->rows; start += AMX_ROWS) {
        const int64_t count = skinny_min(AMX_ROWS, pass->rows - start);
        for (int64_t r = 0; r < count; r++)
            rows[r] = p->query + attention_row(p, p->query_strides, pass->first + unit, start + r) * 2;
        NAMED(pack_panel)(panels + start * pass->packed_bytes, rows, count, p->depth);
    }
}

/* The keys of AMX_ROWS slots from `first` times all rows of a head, as a linear layer with the keys for
 * weights. Past the last key there are zeros: nobody reads those scores. */
TARGET static void NAMED(score_block)(const attention_pass *pass, int64_t unit, int64_t first) {
    const attention_problem *p = pass->problem;
    const int64_t keys = attention_head(p, p->key_strides, pass->first + unit);
    float tiles[PASS_ROWS * AMX_ROWS];
    linear_problem problem = {.weight = p->key + keys * 2, .weight_stride = p->key_strides[2],
                              .depth = p->depth, .outputs = p->slots};
    linear_pass part = {.problem = &problem, .packed_bytes = pass->packed_bytes};
    for (int64_t row = 0; row < pass->rows; row += PASS_ROWS) {
        part.panels = pass->panels + (unit * PACKED_ROWS(pass->rows) + row) * pass->packed_bytes;
        part.panel_count = PANEL_COUNT(skinny_min(PASS_ROWS, pass->rows - row));
        NAMED(tiles_of)(&part, 1, first, tiles);
        for (int64_t i = row; i < skinny_min(row + PASS_ROWS, pass->rows); i += AMX_ROWS)
            NAMED(write_columns)(tiles + (i - row) * AMX_ROWS,
                                 pass->scores + (unit * pass->rows + i) * pass->padded + first, pass->padded,
                                 pass->rows - i);
    }
}

#undef AMX_WEIGHTS
#undef AMX_PANEL
#include "linear_template.h"
#include "attention_template.h"
#include "undef_templates.h"
