/* Root mean square norms of rows, rounded where a chain of PyTorch's operators rounds.
 *
 * All of it but the mean is one operation an element. PyTorch adds a row's adjacent floats in vectors
 * of `lanes`, four vectors side by side, in levels: a level's sums move to the next one after so many
 * steps. Added here in the same order, the bits are the same. The
 * algorithm stands in norm_template.h.
 */
#ifndef NORM_KERNEL_H
#define NORM_KERNEL_H

#include "simd.h"

typedef struct {
    const char *x, *weight; /* [rows, depth] and [depth], adjacent */
    char *y;
    int64_t rows, depth;
    float epsilon;
    int dtype;
    int lanes;
    int shifted; /* times 1 + weight */
    int rounded; /* whether values are, to the dtype, before the weight is multiplied */
} norm_problem;

/* Elements of one unit of work. */
#define CHUNK_NORMED 2048

static inline int64_t norm_chunk_rows(const norm_problem *p) {
    return p->depth < CHUNK_NORMED ? CHUNK_NORMED / p->depth : 1;
}

/* Serves CPUs without a path. */
void plain_norm(norm_problem *);

#endif
