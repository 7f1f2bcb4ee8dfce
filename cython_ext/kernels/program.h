/* Operators, alone and as a program: one after another by one call. Such is what remains of a forward of a few
 * rows when nobody decides anything between two of its operators.
 */
#ifndef PROGRAM_H
#define PROGRAM_H

#include "paths.h"

enum { OPERATION_LINEARS, OPERATION_ATTENTION, OPERATION_NORM, OPERATION_ELEMENTS };

typedef struct {
    int kind;
    int count;     /* linears of the same x, of at most PASS_ROWS rows; attention of rows of a batch */
    void *problem; /* the first one's */
} operation;

/* Operators, and the memory in which they are computed, which grows with what they are given. */
typedef struct {
    operation *operations;
    int count;
    linear_pass *linears; /* one for each operation of that kind, as planned for so many threads */
    int threads;
    char *memory;
    int64_t bytes;
} program;

void free_program(program *);

/* These return 0, or -1 when memory ran out. */
int run_program(program *, const kernel_path *, int threads);

/* `count` problems, at most MAX_TOGETHER, that differ in weights, biases and outputs alone. */
int run_linears(const linear_problem *, int count, const kernel_path *, int threads);

int run_attention(const attention_problem *, const kernel_path *, int threads);

#endif
