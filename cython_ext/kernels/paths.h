/* The kernels for every instruction set, each compiled by a file of its own (avx2.c and so on). The set is
 * chosen at run time: one binary serves every CPU of its architecture. */
#ifndef PATHS_H
#define PATHS_H

#include "attention_kernels.h"
#include "element_kernels.h"
#include "linear_kernels.h"
#include "norm_kernel.h"

/* What an instruction set computes operators by: of linears and attention a plan, which returns the bytes of
 * memory that are needed, and then LINEAR_STEPS or ATTENTION_STEPS steps, in memory that begins at a
 * cache line. Linears have at most PASS_ROWS rows; a plan of attention is for the first heads. */
typedef struct kernel_path {
    const char *name;
    /* The path that computes products of two types, attention as those of two alike; NULL: this one, of all. */
    const struct kernel_path *(*path_of)(int dtype, int weight_dtype);
    int64_t (*plan_linears)(linear_pass *, const linear_problem *, int count, int threads);
    void (*add_linears)(work_step *, linear_pass *, char *memory, int threads);
    int64_t (*plan_attention)(attention_pass *, const attention_problem *, int threads);
    void (*add_attention)(work_step *, attention_pass *, char *memory, int threads);
    work_step (*norm_step)(norm_problem *);
    work_step (*element_step)(element_problem *);
    work_step (*int8_step)(weight_packing *);
    work_step (*int4_step)(weight_packing *);
} kernel_path;

static inline const kernel_path *path_of_linears(const kernel_path *path, const linear_problem *p) {
    return path->path_of ? path->path_of(p->dtype, p->weight_dtype) : path;
}

static inline const kernel_path *path_of_attention(const kernel_path *path, const attention_problem *p) {
    return path->path_of ? path->path_of(p->dtype, p->dtype) : path;
}

#define MAX_PATHS 4

#if defined(__GNUC__) && defined(__x86_64__)
#define X86_PATHS
extern const kernel_path avx2_path, avx2_pairs_path, avx512_path, avx512bf16_path;
#if defined(__linux__) && (__GNUC__ >= 11 || __clang_major__ >= 12)
#define AMX_PATH
int has_amx(void);
kernel_path with_amx(kernel_path path); /* but for what computes products in bfloat16 */
#endif
#elif defined(__GNUC__) && defined(__aarch64__)
#define ARM_PATHS
extern const kernel_path neon_path;
#endif

/* The instruction sets this CPU has, slowest first. Returns how many were written to `paths`. */
int kernel_paths(kernel_path paths[MAX_PATHS]);

#endif
