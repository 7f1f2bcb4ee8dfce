/* Intel's matrix extension (AMX): an instruction adds to 16 x 16 sums the products of 16 rows of weights with as many
 * rows of x, over 64 bytes of each. Weights are read as they lie; x is packed, its rows side by side. It takes
 * subnormal bfloat16 numbers for zero. What the extension does not know goes the way of avx512bf16.c.
 *
 * "Intel 64 and IA-32 Architectures Software Developer's Manual", volume 1, chapter 18. */
#define _DEFAULT_SOURCE /* syscall */
#include "paths.h"

#ifdef AMX_PATH
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define TARGET "amx-tile,amx-bf16,amx-int8,avx512bf16,avx512vnni,avx512f,avx512bw,avx2,fma,f16c"
#include "target_begin.h"
#include "avx512.h"
#include "lanes.h"
#include "rounding.h"

#undef PANEL_ROWS
#define PANEL_ROWS 16  /* of x, the columns of a tile */
#define BLOCK_ROWS 16  /* of weights, the rows of a tile */
#define DEPTH_BYTES 64 /* of both, in one tile */
#define TILE_BYTES (BLOCK_ROWS * DEPTH_BYTES)

/* x in integers of 14 bits is twice as many of seven: the high ones, worth HIGH each, and the low ones. */
#define HALF_BITS 7
#define HIGH (1 << HALF_BITS)
#define SUMMED_BY_TILES (1 << 17) /* products of eight and seven bits that fit 32 */

/* Sums are in tiles 0 and 1, of one panel each, or of high and low parts; weights in 2, x in 3 and 4. */
#define TILES 5
#define WEIGHTS 2
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile ::)
#define TILE_LOAD(tile, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(tile, to, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((int64_t)(stride)) : "memory")
#define ADD_BF16(sums, weights, x) __asm__ volatile("tdpbf16ps %%tmm" #x ", %%tmm" #weights ", %%tmm" #sums ::)
#define ADD_INT8(sums, weights, x) __asm__ volatile("tdpbssd %%tmm" #x ", %%tmm" #weights ", %%tmm" #sums ::)

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

static void configure_tiles(int64_t columns) {
    tile_config config = {.palette = 1};
    for (int i = 0; i < TILES; i++)
        config.rows[i] = 16, config.row_bytes[i] = (uint16_t)(i == WEIGHTS ? DEPTH_BYTES : columns * 4);
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

static int is_rounded(const linear_problem *p) { return p->weight_dtype == SKINNY_ROUNDED; }
static int64_t columns_of(const linear_pass *pass) { return skinny_parts(pass->problems->rows, pass->panel_count); }
static int64_t steps_of(const linear_problem *p) { return skinny_parts(p->depth, is_rounded(p) ? INT8_STEP : 32); }
static int64_t packed_bytes(const linear_problem *p) { return steps_of(p) * DEPTH_BYTES * (is_rounded(p) ? 2 : 1); }
static int64_t places_of(const linear_pass *pass) { return (void)pass, BLOCK_ROWS; }

/* A step of the rows of x, 64 bytes each, side by side. Of what is written last, what stands behind the columns is
 * written over by what comes next. */
static ALWAYS_INLINE char *pack_columns(char *to, int64_t columns, __m512i rows[16]) {
    if (columns == 1) {
        _mm512_storeu_si512(to, rows[0]);
        return to + DEPTH_BYTES;
    }
    transpose(rows);
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i * columns * 4, rows[i]);
    return to + columns * DEPTH_BYTES;
}

static void pack_bf16(char *panel, int64_t columns, const linear_problem *p, int64_t first, int64_t count) {
    __m512i rows[16];
    for (int64_t k = 0; k < p->depth; k += 32) {
        const int64_t there = skinny_min(32, p->depth - k);
        for (int64_t row = 0; row < 16; row++) {
            const char *from = p->x + ((first + row) * p->x_stride + k) * 2;
            rows[row] = _mm512_setzero_si512();
            if (row < count) rows[row] = _mm512_maskz_loadu_epi16(0xffffffffu >> (32 - there), from);
        }
        panel = pack_columns(panel, columns, rows);
    }
}

/* Integers of 14 bits as HIGH * high + low. */
static ALWAYS_INLINE void split(const int16_t rounded[INT8_STEP], __m512i *high, __m512i *low) {
    __m256i highs[2], lows[2];
    for (int i = 0; i < 2; i++) {
        const __m512i all = _mm512_loadu_si512(rounded + 32 * i);
        const __m512i above = _mm512_srai_epi16(_mm512_add_epi16(all, _mm512_set1_epi16(HIGH / 2)), HALF_BITS);
        highs[i] = _mm512_cvtepi16_epi8(above);
        lows[i] = _mm512_cvtepi16_epi8(_mm512_sub_epi16(all, _mm512_slli_epi16(above, HALF_BITS)));
    }
    *high = _mm512_inserti64x4(_mm512_castsi256_si512(highs[0]), highs[1], 1);
    *low = _mm512_inserti64x4(_mm512_castsi256_si512(lows[0]), lows[1], 1);
}

static void pack_rounded(char *panel, int64_t columns, const linear_problem *p, int64_t first, int64_t count,
                         float *scales) {
    const int64_t row_bytes = p->x_stride * skinny_item_bytes(p->dtype);
    float factors[16], step[INT8_STEP];
    int16_t rounded[INT8_STEP];
    for (int64_t row = 0; row < count; row++) {
        const float greatest = greatest_of(p->x + (first + row) * row_bytes, p->depth, p->dtype);
        scales[row] = scale_of(greatest, X_MOST);
        factors[row] = scales[row] > 0 ? X_MOST / greatest : 0;
    }
    for (int64_t k = 0; k < p->depth; k += INT8_STEP) {
        __m512i high[16], low[16];
        for (int64_t row = 0; row < 16; row++) {
            high[row] = low[row] = _mm512_setzero_si512();
            if (row >= count || factors[row] == 0) continue;
            read_step(step, p->x + (first + row) * row_bytes, k, p->depth, p->dtype);
            round_step(rounded, step, factors[row], INT8_STEP);
            split(rounded, high + row, low + row);
        }
        panel = pack_columns(pack_columns(panel, columns, high), columns, low);
    }
}

/* Panels of equally many columns, of which the last ones of the last panel may stay empty. */
static void pack_panels(void *of, int64_t chunk, int thread) {
    const linear_pass *pass = of;
    const linear_problem *p = pass->problems;
    const int64_t columns = columns_of(pass);
    (void)chunk, (void)thread;
    for (int64_t first = 0; first < p->rows; first += columns) {
        const int64_t count = skinny_min(columns, p->rows - first);
        char *panel = pass->panels + first * pass->packed_bytes;
        if (is_rounded(p))
            pack_rounded(panel, columns, p, first, count, pass->x_scales + first);
        else
            pack_bf16(panel, columns, p, first, count);
    }
}

/* Rows of weights in `apart` blocks of BLOCK_ROWS: block b holds b, b + apart, b + 2 apart and so on. So a block after
 * the other is read forward in BLOCK_ROWS places, which the hardware follows and fetches ahead. */
typedef struct {
    const char *weight;
    int64_t rows, row_bytes, depth_bytes, apart;
    char *filled; /* [TILE_BYTES]: what a tile holds of a part that ends before it does, and zeros */
} weight_blocks;

/* A block's part from the k-th byte on; `stride` becomes the distance of its rows. */
static ALWAYS_INLINE const char *part_of(const weight_blocks *w, int64_t block, int64_t k, int64_t *stride) {
    const char *from = w->weight + block * w->row_bytes + k;
    const int64_t bytes = skinny_min(DEPTH_BYTES, w->depth_bytes - k), apart = w->apart * w->row_bytes;
    *stride = apart;
    if (block + (BLOCK_ROWS - 1) * w->apart < w->rows && bytes == DEPTH_BYTES) return from;
    *stride = DEPTH_BYTES;
    memset(w->filled, 0, TILE_BYTES);
    for (int64_t row = 0; block + row * w->apart < w->rows; row++)
        memcpy(w->filled + row * DEPTH_BYTES, from + row * apart, bytes);
    return w->filled;
}

/* One or two panels of x, each of so many bytes for 64 of depth, in rows that lie `row_bytes` apart. */
typedef struct {
    const char *panels[2];
    int64_t count, step, row_bytes;
} x_tiles;

/* A block times one or two panels: sums in tile 0 or 1. */
static ALWAYS_INLINE void multiply_block(const int integers, const weight_blocks *w, int64_t block, const x_tiles *x) {
    const char *first = x->panels[0], *second = x->panels[1];
    TILE_ZERO(0);
    TILE_ZERO(1);
    for (int64_t k = 0; k < w->depth_bytes; k += DEPTH_BYTES, first += x->step, second += x->step) {
        int64_t stride;
        const char *part = part_of(w, block, k, &stride);
        TILE_LOAD(2, part, stride);
        TILE_LOAD(3, first, x->row_bytes);
        if (x->count > 1) TILE_LOAD(4, second, x->row_bytes);
        if (integers) {
            ADD_INT8(0, 2, 3);
            ADD_INT8(1, 2, 4);
        } else {
            ADD_BF16(0, 2, 3);
            if (x->count > 1) ADD_BF16(1, 2, 4);
        }
    }
}

/* Sums in float32 of rows of x to sums[row * CHUNK_ROWS + row of the block]. */
static ALWAYS_INLINE void write_sums(__m512i values[BLOCK_ROWS], int64_t rows, int64_t columns, float *sums) {
    if (columns > 1) transpose(values);
    for (int64_t row = 0; row < rows; row++) _mm512_storeu_si512(sums + row * CHUNK_ROWS, values[row]);
}

/* A block times all panels. */
static ALWAYS_INLINE void multiply_panels(const int integers, const linear_pass *pass, const weight_blocks *w,
                                          int64_t block, float *sums) {
    const int64_t rows = pass->problems->rows, columns = columns_of(pass), bytes = columns * pass->packed_bytes;
    const int64_t halves = columns * DEPTH_BYTES, stride = columns == 1 ? 4 : DEPTH_BYTES;
    x_tiles x = {.step = integers ? 2 * halves : halves, .row_bytes = columns * 4};
    for (int64_t first = 0, panels; first < rows; first += panels * columns) {
        __m512i values[BLOCK_ROWS], others[BLOCK_ROWS];
        panels = integers || first + columns >= rows ? 1 : 2;
        x.panels[0] = pass->panels + first * pass->packed_bytes;
        x.panels[1] = x.panels[0] + (integers ? halves : bytes);
        x.count = integers ? 2 : panels;
        multiply_block(integers, w, block, &x);
        TILE_STORE(0, values, stride);
        if (x.count > 1) TILE_STORE(1, others, stride);
        for (int64_t i = 0; i < BLOCK_ROWS && integers; i++)
            values[i] = _mm512_castps_si512(
                FMA(_mm512_cvtepi32_ps(values[i]), SET1(HIGH), _mm512_cvtepi32_ps(others[i])));
        float *to = sums + first * CHUNK_ROWS;
        write_sums(values, skinny_min(columns, rows - first), columns, to);
        if (panels > 1) write_sums(others, skinny_min(columns, rows - first - columns), columns, to + columns * CHUNK_ROWS);
    }
}

static void multiply_bf16(const linear_pass *pass, const weight_blocks *w, int64_t block, float *sums) {
    multiply_panels(0, pass, w, block, sums);
}

static void multiply_rounded(const linear_pass *pass, const weight_blocks *w, int64_t block, float *sums) {
    multiply_panels(1, pass, w, block, sums);
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
    const int64_t row_bytes = p->weight_stride * skinny_item_bytes(p->weight_dtype);
    char filled[TILE_BYTES];
    const weight_blocks w = {.weight = p->weight + first * row_bytes, .rows = end - first, .row_bytes = row_bytes,
                             .depth_bytes = is_rounded(p) ? steps_of(p) * INT8_STEP : p->depth * 2,
                             .apart = skinny_parts(end - first, BLOCK_ROWS), .filled = filled};
    configure_tiles(columns_of(pass));
    for (int64_t block = 0; block < w.apart; block++)
        (is_rounded(p) ? multiply_rounded : multiply_bf16)(pass, &w, block, sums + block * BLOCK_ROWS);
    release_tiles();
    for (int64_t row = 0; row < p->rows; row++) order_sums(sums + row * CHUNK_ROWS, w.apart);
}

#include "linear_pass.h"

static int is_own(const linear_problem *p) {
    const int halves = p->weight_dtype == SKINNY_BFLOAT16 && p->dtype == SKINNY_BFLOAT16;
    return halves || (is_rounded(p) && p->depth <= SUMMED_BY_TILES);
}

static int64_t plan_linears_by_dtype(linear_pass *pass, const linear_problem *p, int count, int threads) {
    return (is_own(p) ? plan_linears : avx512bf16_path.plan_linears)(pass, p, count, threads);
}

static void add_linears_by_dtype(work_step *steps, linear_pass *pass, char *memory, int threads) {
    (is_own(pass->problems) ? add_linears : avx512bf16_path.add_linears)(steps, pass, memory, threads);
}

/* Whether the CPU has the extension, and Linux lets this process have its registers. */
int has_amx(void) {
    const long request_permission = 0x1023, tile_data = 18;
    const unsigned bf16 = 1u << 22, tile = 1u << 24, int8 = 1u << 25;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (bf16 | tile | int8)) != (bf16 | tile | int8)) return 0;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

kernel_path with_amx(kernel_path path) {
    path.name = "amx", path.plan_linears = plan_linears_by_dtype, path.add_linears = add_linears_by_dtype;
    return path;
}
TARGET_END
#endif
