/* What an operator makes of every element of one or two small tensors, computed in float32 and rounded once:
 * PyTorch takes longer to find out what it is to do. The algorithm stands in element_template.h.
 */
#ifndef ELEMENT_KERNELS_H
#define ELEMENT_KERNELS_H

#include "simd.h"

/* ELEMENT_TABLE looks up in b what an element of two bytes gives, by its bits. */
enum { ELEMENT_COPY, ELEMENT_NEG, ELEMENT_MUL, ELEMENT_ADD, ELEMENT_TABLE };

/* Elements of one unit of work. */
#define CHUNK_ELEMENTS 16384
#define CHUNK_LOOKUPS 2048

/* Tensors of one shape, whose last axis is adjacent; strides count elements. */
typedef struct {
    const char *a, *b; /* operators of one tensor have it for both */
    char *out;
    int64_t shape[4], strides[3][4]; /* strides of a, b and out */
    int dtype;
    int kind;
    const int64_t *places; /* [shape[0], shape[2], 2]: where one tensor has them on these axes; NULL: in order */
    int placed;            /* which one: 0 or 2, a or out */
} element_problem;

/* Where a row of the last axis begins in a, b or out. */
static inline int64_t element_place(const element_problem *p, int tensor, int64_t row) {
    const int64_t *strides = p->strides[tensor], j = row / p->shape[2];
    int64_t first = j / p->shape[1], third = row % p->shape[2];
    if (p->places && tensor == p->placed) {
        const int64_t *place = p->places + 2 * (first * p->shape[2] + third);
        first = place[0], third = place[1];
    }
    return first * strides[0] + j % p->shape[1] * strides[1] + third * strides[2];
}

static inline int64_t element_chunk_rows(const element_problem *p) {
    const int64_t rows = (p->kind == ELEMENT_TABLE ? CHUNK_LOOKUPS : CHUNK_ELEMENTS) / p->shape[3];
    return rows > 1 ? rows : 1;
}

#endif
