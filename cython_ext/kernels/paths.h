/* The kernels for every instruction set, each compiled by a file of its own (avx2.c and so on). The set is
 * chosen at run time: one binary serves every CPU of its architecture. */
#ifndef PATHS_H
#define PATHS_H

#include "attention_kernels.h"
#include "element_kernels.h"
#include "linear_kernels.h"
#include "norm_kernel.h"

typedef struct {
    const char *name;
    int (*linear)(const linear_problem *, int count, int threads); /* 0, or -1 when memory ran out */
    int (*attention)(const attention_problem *, int threads);
    void (*pack_int8)(int8_packing *, int threads);
    int (*norm)(const norm_problem *);
    void (*elements)(const element_problem *);
} kernel_path;

#define MAX_PATHS 3

#if defined(__GNUC__) && defined(__x86_64__)
#define X86_PATHS
extern const kernel_path avx2_path, avx2_pairs_path, avx512_path, avx512bf16_path;
#elif defined(__GNUC__) && defined(__aarch64__)
#define ARM_PATHS
extern const kernel_path neon_path;
#endif

/* The instruction sets this CPU has, slowest first. Returns how many were written to `paths`. */
int kernel_paths(kernel_path paths[MAX_PATHS]);

#endif
