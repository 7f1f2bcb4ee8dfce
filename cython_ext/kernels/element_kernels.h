/* What an operator makes of every element of one or two small tensors, computed in float32 and rounded once:
 * PyTorch takes longer to find out what it is to do. The algorithm stands in element_template.h.
 */
#ifndef ELEMENT_KERNELS_H
#define ELEMENT_KERNELS_H

#include "simd.h"

enum { ELEMENT_COPY, ELEMENT_NEG, ELEMENT_MUL, ELEMENT_ADD };

/* Tensors of one shape, whose last axis is adjacent; strides count elements. */
typedef struct {
    const char *a, *b; /* operators of one tensor have it for both */
    char *out;
    int64_t shape[4], strides[3][4]; /* strides of a, b and out */
    int dtype;
    int kind;
} element_problem;

static inline int64_t element_place(const int64_t strides[4], int64_t i, int64_t j, int64_t k) {
    return i * strides[0] + j * strides[1] + k * strides[2];
}

#endif
