/* Attention of a few queries over many slots: keys and values are read from memory once.
 *
 * The rows of one key-value head are all queries of all query heads that share it. Once they are packed,
 * three steps, each spread over the threads:
 *
 *   scores   keys pass by the packed rows, as weights do in a linear layer
 *   weights  a row's scores are scaled, masked and exponentiated against the row's maximum
 *   outputs  weighted values are summed, a few vectors of their width at a time
 *
 * Many rows read keys and values from the first-level cache, a block of slots at a time.
 *
 * A score is a sum over the depth in an order of its own, a maximum has no order, and a row's weights
 * and weighted values are added one slot after another. A slot of weight zero adds nothing. So a
 * query gives the same bits whatever queries stand beside it, and wherever between the slots that it
 * sees those stand that it does not see. The algorithm stands in attention_template.h.
 */
#ifndef ATTENTION_KERNELS_H
#define ATTENTION_KERNELS_H

#include "simd.h"

/* Keys of one unit of work, and rows of another. */
#define CHUNK_SLOTS 64
#define WEIGHT_ROWS 8

/* Value widths are whole vectors on every instruction set. */
#define WIDTH_MULTIPLE 16

/* Rows of scores are padded to whole vectors. */
#define SLOT_MULTIPLE 16

/* Scores that stay in a thread's second-level cache: as many heads go at a time as fit. */
#define SCORE_BYTES (512 << 10)

/* Keys that stay in the first-level cache while all rows pass by; values that do, and panels of rows whose
 * sums wait beside them. */
#define BLOCK_KEYS 16
#define BLOCK_VALUES 64
#define BLOCK_PANELS 8

/* Waking one more thread costs as much as about so many multiplications; going on with those that are awake,
 * as so many. */
#define THREAD_PRODUCTS (1 << 18)
#define AWAKE_PRODUCTS (1 << 15)

#define ATTENTION_STEPS 4

enum { MASK_NONE, MASK_BOOL, MASK_ADDED };

/* Strides count elements; the last axis of everything is adjacent. */
typedef struct {
    const char *query;  /* [batch, groups * heads, queries, depth] */
    const char *key;    /* [batch, groups, slots, depth] */
    const char *value;  /* [batch, groups, slots, width] */
    const char *mask;   /* [batch, groups * heads, queries, slots] */
    char *out;          /* [batch, queries, groups * heads, width], contiguous */
    int64_t batch, groups, heads, queries, slots, depth, width;
    int64_t query_strides[3], key_strides[3], value_strides[3], mask_strides[3];
    float scale;
    int dtype; /* everything's but a boolean mask's */
    int mask_kind;
} attention_problem;

/* Some of the batch * groups key-value heads, shared by the threads. */
typedef struct {
    const attention_problem *problem;
    int64_t first, count; /* heads: sequence * groups + group */
    int64_t rows;         /* a head's: heads * queries */
    int64_t padded;       /* slots, rounded up */
    int64_t packed_bytes; /* one packed row's */
    int64_t panel_count;
    char *panels;         /* [count, rows], packed */
    float *scores;        /* [count, rows, padded] */
    float *totals;        /* [count, rows]: one over the sum of the weights */
} attention_pass;

/* The threads that a pass is worth, each of which costs as much as so many products. */
static inline int attention_threads(const attention_pass *pass, int threads, int64_t cost) {
    const attention_problem *p = pass->problem;
    const int64_t products = pass->count * pass->rows * p->slots * (p->depth + p->width);
    return (int)skinny_min(threads, products / cost + 1);
}

/* Go on to the next heads of a problem; whether there are any. */
static inline int attention_next(attention_pass *pass) {
    const int64_t heads = pass->problem->batch * pass->problem->groups;
    pass->first += pass->count;
    pass->count = skinny_min(pass->count, heads - pass->first);
    return pass->count > 0;
}

static inline int64_t attention_panel_start(const attention_pass *pass, int64_t i) {
    return pass->rows * i / pass->panel_count;
}

/* Where a row of a head begins in the queries or the mask. */
static inline int64_t attention_row(const attention_problem *p, const int64_t strides[3],
                                    int64_t head, int64_t row) {
    const int64_t query_head = head % p->groups * p->heads + row / p->queries;
    return head / p->groups * strides[0] + query_head * strides[1] + row % p->queries * strides[2];
}

/* Where a head's slots begin in the keys or values. */
static inline int64_t attention_head(const attention_problem *p, const int64_t strides[3],
                                     int64_t head) {
    return head / p->groups * strides[0] + head % p->groups * strides[1];
}

#endif
