/* The bfloat16 extension of AVX-512, whose instruction adds the products of two neighbours to each sum. It
 * takes subnormal numbers for zero, as PyTorch's bfloat16 products on the same CPUs do. CPUs that have it
 * add the products of integers, too. */
#include "paths.h"

#ifdef X86_PATHS
#include <immintrin.h>
#define TARGET "avx512bf16,avx512vnni,avx512f,avx512bw,avx2,fma,f16c"
#include "target_begin.h"
#define ADD_PAIRS(sums, a, b) _mm512_dpwssd_epi32((sums), (a), (b))
#include "avx512.h"

#define PACKED_DTYPE SKINNY_BFLOAT16
#define MULTIPLY_ADD(w, x, sum) _mm512_dpbf16_ps((sum), (__m512bh)(w), (__m512bh)(x))
#include "templates.h"

/* What the extension does not know goes the common way. */
static int linear_by_dtype(const linear_problem *p, int count, int threads) {
    const int halves = p->weight_dtype == SKINNY_BFLOAT16 && p->dtype == SKINNY_BFLOAT16;
    const int own = halves || p->weight_dtype == SKINNY_ROUNDED;
    return own ? linear(p, count, threads) : avx512_path.linear(p, count, threads);
}

static int attention_by_dtype(const attention_problem *p, int threads) {
    return p->dtype == SKINNY_BFLOAT16 ? attention(p, threads) : avx512_path.attention(p, threads);
}

const kernel_path avx512bf16_path = {"avx512bf16", linear_by_dtype, attention_by_dtype, pack_int8, norm, elements};
TARGET_END
#endif
