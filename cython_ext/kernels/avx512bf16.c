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
static const kernel_path *path_of(int dtype, int weight_dtype) {
    const int halves = dtype == SKINNY_BFLOAT16 && weight_dtype == dtype;
    const int own = halves || weight_dtype == SKINNY_ROUNDED || weight_dtype == SKINNY_INT4;
    return own ? &avx512bf16_path : &avx512_path;
}

const kernel_path avx512bf16_path = {"avx512bf16", path_of, OWN_FUNCTIONS};
TARGET_END
#endif
