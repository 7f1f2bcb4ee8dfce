#include "paths.h"

#ifdef X86_PATHS
#include <immintrin.h>
#define TARGET "avx2,fma,f16c"
#include "target_begin.h"
#include "avx2.h"

#define PACKED_DTYPE SKINNY_FLOAT32
#define MULTIPLY_ADD(w, x, sum) FMA((w), (x), (sum))
#include "templates.h"

static int are_pairs(const linear_problem *p) {
    return p->weight_dtype == SKINNY_BFLOAT16 && p->dtype == SKINNY_BFLOAT16;
}

static int64_t plan_linears_by_dtype(linear_pass *pass, const linear_problem *p, int count, int threads) {
    return (are_pairs(p) ? avx2_pairs_path.plan_linears : plan_linears)(pass, p, count, threads);
}

static void add_linears_by_dtype(work_step *steps, linear_pass *pass, char *memory, int threads) {
    (are_pairs(pass->problems) ? avx2_pairs_path.add_linears : add_linears)(steps, pass, memory, threads);
}

static int64_t plan_attention_by_dtype(attention_pass *pass, const attention_problem *p, int threads) {
    const int pairs = p->dtype == SKINNY_BFLOAT16;
    return (pairs ? avx2_pairs_path.plan_attention : plan_attention)(pass, p, threads);
}

static void add_attention_by_dtype(work_step *steps, attention_pass *pass, char *memory, int threads) {
    const int pairs = pass->problem->dtype == SKINNY_BFLOAT16;
    (pairs ? avx2_pairs_path.add_attention : add_attention)(steps, pass, memory, threads);
}

const kernel_path avx2_path = {
    "avx2",    plan_linears_by_dtype, add_linears_by_dtype, plan_attention_by_dtype, add_attention_by_dtype,
    norm_step, element_step,          pack_int8, pack_int4};
TARGET_END
#endif
