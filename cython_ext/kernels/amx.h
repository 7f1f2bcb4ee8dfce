/* AMX: 32 weight rows times up to 16 input rows, or 16 times up to 64, 32 bfloat16 at a time. A tile
 * of weights is read as it lies in memory; the input rows are packed so that a tile holds 16 of them,
 * two neighbours of the depth side by side. Its sums run along the depth two by two, one accumulator
 * each, and take subnormal numbers for zero. */
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
#define TARGET __attribute__((target("amx-tile,amx-bf16,avx512bf16,avx512f,avx2,fma,f16c")))
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

/* Panels of AMX_ROWS rows one after another, each as [steps][AMX_ROWS pairs][rows][2]; zeros where x
 * ends. */
TARGET static void NAMED(pack_panels)(char *panels, const linear_pass *pass) {
    const linear_problem *p = pass->problem;
    const int64_t pairs = p->depth / 2, line = AMX_ROWS * 4;
    memset(panels, 0, PACKED_ROWS(p->rows) * pass->packed_bytes);
    for (int64_t start = 0; start < p->rows; start += AMX_ROWS) {
        char *panel = panels + start * pass->packed_bytes;
        const char *x = p->x + start * p->x_stride * 2;
        const int64_t rows = skinny_min(AMX_ROWS, p->rows - start);
        for (int64_t pair = 0; pair < pairs; pair++)
            for (int64_t r = 0; r < rows; r++)
                memcpy(panel + pair * line + r * 4, x + (r * p->x_stride + pair * 2) * 2, 4);
        for (int64_t r = 0; r < rows && p->depth % 2; r++)
            memcpy(panel + pairs * line + r * 4, x + (r * p->x_stride + pairs * 2) * 2, 2);
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

/* The same into rows of CHUNK_ROWS sums: tiles hold them as [panels or groups][AMX_ROWS][AMX_ROWS].
 * Returns how many weight rows that were. */
TARGET static int64_t NAMED(tile_row)(const linear_pass *pass, int64_t first, float *sums) {
    const __m512i lines = _mm512_mullo_epi32(
        _mm512_set1_epi32(AMX_ROWS),
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    const int64_t groups = pass->panel_count == 1 ? 2 : 1;
    float tiles[PASS_ROWS * AMX_ROWS];
    switch (pass->panel_count) {
        case 1: NAMED(tiles)(1, 2, pass, first, tiles); break;
        case 2: NAMED(tiles)(2, 1, pass, first, tiles); break;
        case 3: NAMED(tiles)(3, 1, pass, first, tiles); break;
        default: NAMED(tiles)(4, 1, pass, first, tiles);
    }
    for (int64_t group = 0; group < groups; group++)
        for (int64_t row = 0; row < pass->problem->rows; row++) {
            const int64_t tile = row / AMX_ROWS + group;
            const float *from = tiles + tile * AMX_ROWS * AMX_ROWS + row % AMX_ROWS;
            STORE(sums + row * CHUNK_ROWS + group * AMX_ROWS, _mm512_i32gather_ps(lines, from, 4));
        }
    return groups * AMX_ROWS;
}

TARGET static void NAMED(chunk)(const linear_pass *pass, int64_t first, int64_t count, float *sums) {
    for (int64_t o = 0; o < count;) o += NAMED(tile_row)(pass, first + o, sums + o);
}

#undef AMX_WEIGHTS
#undef AMX_PANEL
#include "linear_template.h"
#include "undef_templates.h"

static int skinny_linear_with_amx(const linear_problem *problem, int threads) {
    return problem->dtype == SKINNY_BFLOAT16 ? skinny_linear_amx(problem, threads)
                                             : skinny_linear_avx512(problem, threads);
}
