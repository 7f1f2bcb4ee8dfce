/* y = x W^T + b for a few rows of x: the weights are read from memory once for all rows.
 *
 * Every element of y is one sum over k, taken in an order that depends on k and on the instruction
 * set alone: one accumulator of LANES partial sums runs along k, and its lanes are added in a fixed
 * tree. How rows and threads are split never enters, so a row of x gives the same bits alone as in
 * company. The algorithm stands in linear_template.h.
 */
#ifndef LINEAR_KERNELS_H
#define LINEAR_KERNELS_H

#include "simd.h"

/* Most weight rows of one unit of work, which is a multiple of the next number; input rows of one pass;
 * layers that may share one. */
#define CHUNK_ROWS 256
#define CHUNK_MULTIPLE 16
#define PASS_ROWS 64
#define MAX_TOGETHER 4
#define LINEAR_STEPS 2

/* Bytes, in each place that a chunk is read in, between what is multiplied and what is fetched; the fewest where
 * several panels fetch it; and how much later those do so again. */
#define AHEAD 2048
#define LEAST_AHEAD 8192
#define FETCHED_AGAIN 8192

/* Rows of a forward over a root and 64 draft tokens, the most that a scope computes here. */
#define ROUTED_ROWS 65

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
    int dtype;           /* x, bias and y have it */
    int weight_dtype;    /* the same; float32 times bfloat16; any times int8, as it is or rounded; or int4 */
    const char *scales;  /* int8's: [outputs], or NULL */
    int scale_dtype;
} linear_problem;

/* A matrix in int8 has one scale a row; its rows are filled up to whole steps with zeros. x is rounded to 14 bits, so
 * that each lane can sum up SUMMED products in 32. */
#define INT8_STEP 64
#define X_STEP_BYTES (INT8_STEP * 2)
#define INT8_MOST 127.0f
#define X_MOST 8191.0f
#define SUMMED 2048
#define INT8_LEAST 1e-30f /* what is less in magnitude counts as zero */

/* A matrix in four bits is kept in blocks of INT4_ROWS outputs and INT4_GROUP columns: a scale in float16 of each
 * output, then for every 8 columns 4 bytes of each, of which the low halves hold the first 4 columns and the high ones
 * the others, as numbers of levels. Blocks of the same outputs follow one another, and what they are filled up with is
 * zero. To a linear problem such rows lie INT4_ROW_BYTES for each group apart. */
#define INT4_GROUP 32
#define INT4_ROWS 16
#define INT4_ROW_BYTES (2 + INT4_GROUP / 2)
#define INT4_BLOCK_BYTES (INT4_ROWS * INT4_ROW_BYTES)

/* A matrix to be rounded to int8 or to four bits. */
typedef struct {
    const char *weight; /* [outputs, depth] */
    int64_t outputs, depth, weight_stride;
    int dtype;
    char *values;                /* int8 [outputs, steps, INT8_STEP], or the blocks */
    float *scales;               /* int8's: [outputs] */
    float *left_out;             /* int8's: [outputs], the norm of what rounding leaves out of a row, rounded up */
    float *norms;                /* int8's: [outputs], of the row itself, rounded up */
    const float *column_weights; /* four bits': [depth], how much what is left out of a column counts */
} weight_packing;

/* What a weight in four bits may be, plus INT4_ZERO, times its scale: 16 levels that leave out least of 32 normal
 * numbers. None is zero: that the gaps beside it differ lets either sign of a scale fit other groups. Two products
 * with numbers of eight bits fit 16. */
static const uint8_t int4_levels[16] = {0, 13, 24, 32, 40, 47, 53, 59, 66, 72, 78, 85, 92, 100, 111, 126};
#define INT4_ZERO 64

/* One pass over the weights of problems that share x, shared by its threads. */
typedef struct {
    const linear_problem *problems;
    int count;
    int64_t chunk_rows[MAX_TOGETHER];
    int64_t chunks[MAX_TOGETHER];
    int64_t packed_bytes; /* one packed row's */
    int64_t panel_count;
    int64_t all_chunks; /* 1: they are one thread's */
    int64_t bytes;      /* memory that the pass needs */
    char *panels;    /* the rows of x, packed */
    float *x_scales; /* [rows] of x, where it is rounded */
    float *sums;     /* [threads, rows, CHUNK_ROWS] */
} linear_pass;

/* Where the i-th of equally high panels, give or take a row, begins. */
static inline int64_t linear_panel_start(const linear_pass *pass, int64_t i) {
    return pass->problems->rows * i / pass->panel_count;
}

/* The threads that are worth waking for `count` problems. */
static inline int linear_threads(const linear_problem *problems, int count, int threads) {
    int64_t weight_bytes = 0, chunks = 1;
    for (int i = 0; i < count; i++) {
        const linear_problem *p = problems + i;
        weight_bytes += p->outputs * p->depth * skinny_item_bytes(p->weight_dtype);
        chunks += skinny_parts(p->outputs, CHUNK_MULTIPLE);
    }
    return (int)skinny_min(threads, skinny_min(chunks, weight_bytes / THREAD_BYTES + 1));
}

/* Weight rows of a problem's units of work, so that the last threads to end wait least for each other. */
static inline int64_t linear_chunk_rows(int64_t outputs, int threads) {
    int64_t best = CHUNK_ROWS, least = INT64_MAX;
    for (int64_t rows = CHUNK_ROWS; rows >= CHUNK_MULTIPLE; rows -= CHUNK_MULTIPLE) {
        const int64_t longest = skinny_parts(skinny_parts(outputs, rows), threads) * rows;
        if (longest < least) best = rows, least = longest;
    }
    return best;
}

#endif
