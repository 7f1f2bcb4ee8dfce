/* Intel's matrix extension (AMX): an instruction adds to 16 x 16 sums the products of 16 rows of weights with as many
 * rows of x, over 32 columns in bfloat16. Weights are read as they lie; x is packed, its rows side by side. Subnormal
 * numbers count as zero. What is not in bfloat16 goes the way of avx512bf16.c.
 *
 * "Intel 64 and IA-32 Architectures Software Developer's Manual", volume 1, chapter 18. */
#define _DEFAULT_SOURCE /* syscall */
#include "paths.h"

#ifdef AMX_PATH
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define TARGET "amx-tile,amx-bf16,avx512f,avx512bw,avx2,fma,f16c"
#include "target_begin.h"
#include "avx512.h"
#include "lanes.h"

#undef PANEL_ROWS
#define PANEL_ROWS 16  /* of x, the columns of a tile; PASS_ROWS are four panels */
#define BLOCK_ROWS 16  /* of weights, the rows of a tile */
#define DEPTH 32       /* columns of both in a tile */
#define ROW_BYTES (DEPTH * 2)

/* Sums are in tiles 0 to 3, one for each panel, weights in 4 and x in 5 to 7. */
#define TILES 8
#define WEIGHTS 4
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile ::)
#define TILE_LOAD(tile, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(tile, to, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((int64_t)(stride)) : "memory")
#define TILE_ADD(sums, x) __asm__ volatile("tdpbf16ps %%tmm" #x ", %%tmm4, %%tmm" #sums ::)

static void configure_tiles(int64_t columns) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < TILES; i++)
        config.rows[i] = 16, config.row_bytes[i] = (uint16_t)(i == WEIGHTS ? ROW_BYTES : columns * 4);
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
}

static void release_tiles(void) { __asm__ volatile("tilerelease" ::); }

/* Quarters of pairs of vectors: the even ones of both, or the odd ones. */
#define EVEN_QUARTERS(a, b) _mm512_shuffle_i32x4((a), (b), 0x88)
#define ODD_QUARTERS(a, b) _mm512_shuffle_i32x4((a), (b), 0xdd)

/* Rows become columns, of 32 bits each. */
static ALWAYS_INLINE void transpose(__m512i rows[16]) {
    __m512i pairs[16], fours[16];
    for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        for (int j = 0; j < 2; j++) {
            fours[i + 2 * j] = _mm512_unpacklo_epi64(pairs[i + j], pairs[i + j + 2]);
            fours[i + 2 * j + 1] = _mm512_unpackhi_epi64(pairs[i + j], pairs[i + j + 2]);
        }
    }
    for (int j = 0; j < 4; j++) {
        const __m512i even = EVEN_QUARTERS(fours[j], fours[4 + j]), odd = ODD_QUARTERS(fours[j], fours[4 + j]);
        const __m512i evens = EVEN_QUARTERS(fours[8 + j], fours[12 + j]);
        const __m512i odds = ODD_QUARTERS(fours[8 + j], fours[12 + j]);
        rows[j] = EVEN_QUARTERS(even, evens), rows[8 + j] = ODD_QUARTERS(even, evens);
        rows[4 + j] = EVEN_QUARTERS(odd, odds), rows[12 + j] = ODD_QUARTERS(odd, odds);
    }
}

static int64_t columns_of(const linear_pass *pass) { return skinny_parts(pass->problems->rows, pass->panel_count); }
static int64_t packed_bytes(const linear_problem *p) { return skinny_parts(p->depth, DEPTH) * ROW_BYTES; }
static int64_t places_of(const linear_pass *pass) { return (void)pass, BLOCK_ROWS; }

/* A panel as [steps][16 pairs of neighbours][columns]; columns behind the rows stay zero. What a step writes behind
 * its own columns the next one writes over. */
static void pack_panel(char *panel, int64_t columns, const linear_problem *p, int64_t first, int64_t count) {
    for (int64_t k = 0; k < p->depth; k += DEPTH, panel += columns * ROW_BYTES) {
        const __mmask32 there = 0xffffffffu >> (DEPTH - skinny_min(DEPTH, p->depth - k));
        __m512i rows[16];
        for (int64_t i = 0; i < 16; i++) {
            const char *from = p->x + ((first + i) * p->x_stride + k) * 2;
            rows[i] = i < count ? _mm512_maskz_loadu_epi16(there, from) : _mm512_setzero_si512();
        }
        if (columns > 1) transpose(rows);
        for (int64_t i = 0; i < (columns > 1 ? 16 : 1); i++) _mm512_storeu_si512(panel + i * columns * 4, rows[i]);
    }
}

/* Panels of equally many columns, of which the last ones of the last panel may stay empty. */
static void pack_panels(void *of, int64_t chunk, int thread) {
    const linear_pass *pass = of;
    const linear_problem *p = pass->problems;
    const int64_t columns = columns_of(pass);
    (void)chunk, (void)thread;
    for (int64_t first = 0; first < p->rows; first += columns)
        pack_panel(pass->panels + first * pass->packed_bytes, columns, p, first, skinny_min(columns, p->rows - first));
}

/* Rows of weights in `apart` blocks of BLOCK_ROWS: block b holds b, b + apart, b + 2 apart and so on. So a block after
 * the other is read forward in BLOCK_ROWS places, which the hardware follows and fetches ahead. */
typedef struct {
    const char *weight;
    int64_t rows, row_bytes, depth, apart;
    char *filled; /* what a tile holds of a part that ends before it does, and zeros */
} weight_blocks;

/* A block's part from the k-th column on; `stride` becomes the distance of its rows in bytes. */
static ALWAYS_INLINE const char *part_of(const weight_blocks *w, int64_t block, int64_t k, int64_t *stride) {
    const char *from = w->weight + block * w->row_bytes + k * 2;
    const int64_t apart = w->apart * w->row_bytes;
    *stride = apart;
    if (block + (BLOCK_ROWS - 1) * w->apart < w->rows && k + DEPTH <= w->depth) return from;
    *stride = ROW_BYTES;
    memset(w->filled, 0, BLOCK_ROWS * ROW_BYTES);
    for (int64_t i = 0; block + i * w->apart < w->rows; i++)
        memcpy(w->filled + i * ROW_BYTES, from + i * apart, skinny_min(DEPTH, w->depth - k) * 2);
    return w->filled;
}

/* A block times the panels, which are equally long. */
static void multiply_block(const weight_blocks *w, int64_t block, const char *panels, int64_t count, int64_t columns) {
    const int64_t row = columns * 4, step = columns * ROW_BYTES, panel = skinny_parts(w->depth, DEPTH) * step;
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int64_t k = 0; k < w->depth; k += DEPTH, panels += step) {
        int64_t stride;
        const char *part = part_of(w, block, k, &stride);
        TILE_LOAD(4, part, stride);
        TILE_LOAD(5, panels, row);
        TILE_ADD(0, 5);
        if (count == 1) continue;
        TILE_LOAD(6, panels + panel, row);
        TILE_ADD(1, 6);
        if (count == 2) continue;
        TILE_LOAD(7, panels + 2 * panel, row);
        TILE_ADD(2, 7);
        if (count == 3) continue;
        TILE_LOAD(5, panels + 3 * panel, row);
        TILE_ADD(3, 5);
    }
}

/* A panel's sums to sums[row * CHUNK_ROWS + row of the block]. */
static void write_sums(int64_t panel, int64_t rows, int64_t columns, float *sums) {
    const int64_t stride = columns > 1 ? ROW_BYTES : 4;
    __m512i values[BLOCK_ROWS];
    if (panel == 0) TILE_STORE(0, values, stride);
    if (panel == 1) TILE_STORE(1, values, stride);
    if (panel == 2) TILE_STORE(2, values, stride);
    if (panel == 3) TILE_STORE(3, values, stride);
    if (columns > 1) transpose(values);
    for (int64_t row = 0; row < rows; row++) _mm512_storeu_si512(sums + row * CHUNK_ROWS, values[row]);
}

/* A row's sums in the order of the outputs, instead of that of the blocks. */
static void order_sums(float *sums, int64_t blocks) {
    __m512i values[BLOCK_ROWS];
    for (int64_t i = 0; i < BLOCK_ROWS; i++) values[i] = _mm512_loadu_si512(sums + i * BLOCK_ROWS);
    transpose(values);
    for (int64_t i = 0; i < BLOCK_ROWS; i++) _mm512_storeu_si512(sums + i * blocks, values[i]);
}

static void multiply_outputs(const linear_pass *pass, const linear_problem *p, int64_t first, int64_t end,
                             float *sums) {
    const int64_t row_bytes = p->weight_stride * 2, columns = columns_of(pass);
    char filled[BLOCK_ROWS * ROW_BYTES];
    const weight_blocks w = {p->weight + first * row_bytes, end - first, row_bytes, p->depth,
                             skinny_parts(end - first, BLOCK_ROWS), filled};
    configure_tiles(columns);
    for (int64_t block = 0; block < w.apart; block++) {
        multiply_block(&w, block, pass->panels, pass->panel_count, columns);
        for (int64_t panel = 0, row = 0; row < p->rows; panel++, row += columns)
            write_sums(panel, skinny_min(columns, p->rows - row), columns,
                       sums + row * CHUNK_ROWS + block * BLOCK_ROWS);
    }
    release_tiles();
    for (int64_t row = 0; row < p->rows; row++) order_sums(sums + row * CHUNK_ROWS, w.apart);
}

#include "linear_pass.h"

static kernel_path amx_path;

static const kernel_path *path_of(int dtype, int weight_dtype) {
    const int halves = dtype == SKINNY_BFLOAT16 && weight_dtype == dtype;
    return halves ? &amx_path : avx512bf16_path.path_of(dtype, weight_dtype);
}

/* Whether the CPU has the extension, and Linux lets this process have its registers. */
int has_amx(void) {
    const long request_permission = 0x1023, tile_data = 18;
    const unsigned needed = 1u << 22 | 1u << 24; /* bfloat16, tiles */
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & needed) != needed) return 0;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

kernel_path with_amx(kernel_path path) {
    path.name = "amx", path.path_of = path_of, path.plan_linears = plan_linears, path.add_linears = add_linears;
    return amx_path = path;
}
TARGET_END
#endif
