/* y = x W^T + b for a few rows of x: the weights are read from memory once for all rows.
 *
 * Every element of y is one sum over k, taken in an order that depends on k and on the instruction
 * set alone: one accumulator of LANES partial sums runs along k, and its lanes are added in a fixed
 * tree. How rows and threads are split never enters, so a row of x gives the same bits alone as in
 * company.
 *
 * skinny_template.h holds the algorithm. It is compiled once for each instruction set below, with
 * function-level targets, and the set is chosen at run time: one binary serves every CPU of its
 * architecture.
 */
#ifndef SKINNY_KERNELS_H
#define SKINNY_KERNELS_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "openmp_runtime.h"

enum { SKINNY_FLOAT32, SKINNY_BFLOAT16, SKINNY_FLOAT16 };

/* Weight rows of one register tile, weight rows of one unit of work, and input rows of one pass. */
#define TILE_ROWS 4
#define CHUNK_ROWS 64
#define PASS_ROWS 64
#define CACHE_LINE 64

/* Rows of weights are fetched ahead by TILE_ROWS of them, as long as two such blocks stay in a
 * first-level cache. Longer rows are streams that the hardware follows by itself. */
#define AHEAD_BYTES 32768

/* Waking one more thread costs as much as reading about so many bytes of weights. */
#define THREAD_BYTES 65536

/* Strides count elements; a row's elements are adjacent. */
typedef struct {
    const char *x;      /* [rows, depth] */
    const char *weight; /* [outputs, depth] */
    const char *bias;   /* [outputs] or NULL */
    char *y;            /* [rows, outputs] */
    int64_t rows, depth, outputs;
    int64_t x_stride, weight_stride, y_stride;
    int dtype;
} skinny_problem;

/* One pass over the weights, shared by its threads. */
typedef struct {
    const skinny_problem *problem;
    char *panels;         /* the rows of x, packed */
    int64_t packed_bytes; /* of one packed row */
    int64_t panel_count;
    float *sums;          /* [threads, rows, CHUNK_ROWS] */
    int64_t next_chunk;   /* taken atomically, like the next */
    int64_t next_thread;
} skinny_pass;

/* TILE_ROWS rows of weights times one panel, and the weights to fetch meanwhile: `ahead_lines` cache
 * lines with every step. */
typedef struct {
    const char *weight[TILE_ROWS];
    const char *panel;
    int64_t depth;
    const char *ahead;
    int64_t ahead_lines;
    float *sums;
} skinny_tile;

static inline int64_t skinny_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t skinny_item_bytes(int dtype) { return dtype == SKINNY_FLOAT32 ? 4 : 2; }

/* Panels of equal height, give or take one row: panel i holds the rows from here to i + 1's start. */
static inline int64_t skinny_panel_start(const skinny_pass *pass, int64_t i) {
    return pass->problem->rows * i / pass->panel_count;
}

#if defined(__GNUC__)
#define ALWAYS_INLINE inline __attribute__((always_inline))
#define PREFETCH(address) __builtin_prefetch(address)
#define FETCH_ADD(counter) __atomic_fetch_add((counter), 1, __ATOMIC_RELAXED)
#else
#define ALWAYS_INLINE inline
#define PREFETCH(address) ((void)(address))
#define FETCH_ADD(counter) ((*(counter))++)
#endif

#define PASTE_(name, isa) skinny_##name##_##isa
#define PASTE(name, isa) PASTE_(name, isa)
#define NAMED(name) PASTE(name, ISA)

#include "skinny_portable.h"
#if defined(__GNUC__) && defined(__x86_64__)
#include "skinny_avx2.h"
#include "skinny_avx512.h"
#elif defined(__GNUC__) && defined(__aarch64__)
#include "skinny_neon.h"
#endif

typedef int (*skinny_entry)(const skinny_problem *, int threads);
typedef struct {
    const char *name;
    skinny_entry run;
} skinny_path;

/* The instruction sets this CPU has, slowest first. Returns how many were written to `paths`. */
static int skinny_paths(skinny_path paths[4]) {
    int count = 0;
    paths[count++] = (skinny_path){"portable", skinny_run_portable};
#if defined(__GNUC__) && defined(__x86_64__)
    if (skinny_cpu_has_avx2()) paths[count++] = (skinny_path){"avx2", skinny_run_avx2};
    if (skinny_cpu_has_avx512()) paths[count++] = (skinny_path){"avx512", skinny_run_avx512};
    if (skinny_cpu_has_avx512bf16())
        paths[count++] = (skinny_path){"avx512bf16", skinny_run_with_avx512bf16};
#elif defined(__GNUC__) && defined(__aarch64__)
    paths[count++] = (skinny_path){"neon", skinny_run_neon};
#endif
    return count;
}

#endif
