/* bfloat16 by AVX2: of each pair in 32 bits one instruction makes a float32 number of the second, and one of
 * the first, where widening eight numbers takes two. */
#include "paths.h"

#ifdef X86_PATHS
#include <immintrin.h>
#define TARGET "avx2,fma,f16c"
#include "target_begin.h"
#include "avx2.h"

static ALWAYS_INLINE __m256 of_pairs(__m256 pairs, int second) {
    const __m256i bits = _mm256_castps_si256(pairs), high = _mm256_set1_epi32((int)0xffff0000u);
    return _mm256_castsi256_ps(second ? _mm256_and_si256(bits, high) : _mm256_slli_epi32(bits, 16));
}

#define PACKED_DTYPE SKINNY_BFLOAT16
#define PARTS 2
#define PART(operand, i) of_pairs((operand), (i))
#define MULTIPLY_ADD(w, x, sum) FMA((w), (x), (sum))
#include "templates.h"

const kernel_path avx2_pairs_path = {"avx2", NULL, OWN_FUNCTIONS};
TARGET_END
#endif
