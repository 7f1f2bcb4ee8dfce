/* The bfloat16 extension of AVX-512, whose instruction adds the products of two neighbours to each sum. It
 * takes subnormal numbers for zero, as PyTorch's bfloat16 products on the same CPUs do. CPUs that have it
 * add the products of integers, too. */
#include "paths.h"

#ifdef X86_PATHS
#include <immintrin.h>
#define TARGET "avx512bf16,avx512vnni,avx512f,avx512bw,avx2,fma,f16c"
#include "target_begin.h"
#define ADD_PAIRS(sums, a, b) _mm512_dpwssd_epi32((sums), (a), (b))
#define ADD_FOURS(sums, w, x) _mm512_dpbusd_epi32((sums), (w), (x))
#include "avx512.h"

#define PACKED_DTYPE SKINNY_BFLOAT16
#define MULTIPLY_ADD(w, x, sum) _mm512_dpbf16_ps((sum), (__m512bh)(w), (__m512bh)(x))
#include "templates.h"

/* What the extension does not know goes the common way. */
static int is_own(const linear_problem *p) {
    const int halves = p->weight_dtype == SKINNY_BFLOAT16 && p->dtype == SKINNY_BFLOAT16;
    return halves || p->weight_dtype == SKINNY_ROUNDED || p->weight_dtype == SKINNY_INT4;
}

static int64_t plan_linears_by_dtype(linear_pass *pass, const linear_problem *p, int count, int threads) {
    return (is_own(p) ? plan_linears : avx512_path.plan_linears)(pass, p, count, threads);
}

static void add_linears_by_dtype(work_step *steps, linear_pass *pass, char *memory, int threads) {
    (is_own(pass->problems) ? add_linears : avx512_path.add_linears)(steps, pass, memory, threads);
}

static int64_t plan_attention_by_dtype(attention_pass *pass, const attention_problem *p, int threads) {
    return (p->dtype == SKINNY_BFLOAT16 ? plan_attention : avx512_path.plan_attention)(pass, p, threads);
}

static void add_attention_by_dtype(work_step *steps, attention_pass *pass, char *memory, int threads) {
    const int own = pass->problem->dtype == SKINNY_BFLOAT16;
    (own ? add_attention : avx512_path.add_attention)(steps, pass, memory, threads);
}

const kernel_path avx512bf16_path = {
    "avx512bf16",   plan_linears_by_dtype, add_linears_by_dtype, plan_attention_by_dtype, add_attention_by_dtype,
    norm_step,      element_step,          pack_int8, pack_int4};
TARGET_END
#endif
