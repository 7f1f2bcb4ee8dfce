/* AVX-512: 4 x 6 accumulators of 16 floats; and its bfloat16 extension, whose instruction adds the
 * products of two neighbours to each of them. That one takes subnormal numbers for zero, as
 * PyTorch's bfloat16 products on the same CPUs do. */
#include <immintrin.h>

static int skinny_cpu_has_avx512(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           skinny_cpu_has_avx2();
}

#define ISA avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx2,fma,f16c")))
#define VEC __m512
#define LANES 16
#define PANEL_ROWS 6
#define ZERO() _mm512_setzero_ps()
#define LOAD(p) _mm512_loadu_ps(p)
#define STORE(p, v) _mm512_storeu_ps((p), (v))
#define SET1(x) _mm512_set1_ps(x)
#define ADD(a, b) _mm512_add_ps((a), (b))
#define MAX(a, b) _mm512_max_ps((a), (b))
#define FMA(a, b, c) _mm512_fmadd_ps((a), (b), (c))
#define POWER2(t) skinny_power2_avx512(t)
#define PACKED_DTYPE SKINNY_FLOAT32
#define MULTIPLY_ADD(w, x, sum) FMA((w), (x), (sum))
#define LOAD_BF16(p) skinny_load_bf16_avx512(p)
#define LOAD_F16(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define STORE_BF16(p, v) skinny_store_bf16_avx512((p), (v))
#define STORE_F16(p, v) \
    _mm256_storeu_si256((__m256i *)(p), _mm512_cvtps_ph((v), _MM_FROUND_TO_NEAREST_INT))
#define SUM_LANES(a, b, c, d, out) skinny_sum_lanes_avx512((a), (b), (c), (d), (out))
#define LOAD_INT8(p) _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p))))
#define INT8_GROUP __m512i
#define LOAD_INT8_GROUP(p) _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(p)))
#define INT8_GROUP_DOT(w, p) _mm512_cvtepi32_ps(_mm512_madd_epi16((w), _mm512_loadu_si512(p)))

TARGET static ALWAYS_INLINE __m512 skinny_load_bf16_avx512(const char *p) {
    const __m256i half = _mm256_loadu_si256((const __m256i *)p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* To nearest, ties to even; a NaN becomes the quiet NaN, lest rounding carry it into infinity. */
TARGET static ALWAYS_INLINE void skinny_store_bf16_avx512(char *p, __m512 v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    rounded = _mm512_mask_set1_epi32(rounded, nan, 0x7fc00000);
    const __m256i half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
    _mm256_storeu_si256((__m256i *)p, half);
}

TARGET static ALWAYS_INLINE __m512 skinny_power2_avx512(__m512 t) {
    const __m512i exponent = _mm512_add_epi32(_mm512_castps_si512(t), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
}

/* Quarters of a, b, c and d are added in pairs and come to lie side by side, then their elements are. */
TARGET static ALWAYS_INLINE __m512 skinny_add_quarters_avx512(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

TARGET static ALWAYS_INLINE void skinny_sum_lanes_avx512(__m512 a, __m512 b, __m512 c, __m512 d,
                                                         float *out) {
    const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
    __m512 sums = skinny_add_quarters_avx512(skinny_add_quarters_avx512(a, b),
                                             skinny_add_quarters_avx512(c, d));
    sums = _mm512_add_ps(sums, _mm512_permute_ps(sums, 0xb1));
    sums = _mm512_add_ps(sums, _mm512_permute_ps(sums, 0x4e));
    _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, sums)));
}

#include "templates.h"

static int skinny_cpu_has_avx512bf16(void) {
    return __builtin_cpu_supports("avx512bf16") && skinny_cpu_has_avx512();
}

#define ISA avx512bf16
#define TARGET __attribute__((target("avx512bf16,avx512f,avx512bw,avx2,fma,f16c")))
#define PACKED_DTYPE SKINNY_BFLOAT16
#define MULTIPLY_ADD(w, x, sum) _mm512_dpbf16_ps((sum), (__m512bh)(w), (__m512bh)(x))
#include "templates.h"
#if HAS_AMX
#include "amx.h"
#endif
#include "undef_vectors.h"

/* What an extension does not know goes the common way. */
#define SKINNY_WITH(extension)                                                                  \
    static int skinny_linear_with_##extension(const linear_problem *problem, int threads) {     \
        return problem->weight_dtype == SKINNY_BFLOAT16 && problem->dtype == SKINNY_BFLOAT16    \
                   ? skinny_linear_##extension(problem, threads)                                \
                   : skinny_linear_avx512(problem, threads);                                    \
    }                                                                                           \
    static int skinny_attention_with_##extension(const attention_problem *problem, int threads) { \
        return problem->dtype == SKINNY_BFLOAT16 ? skinny_attention_##extension(problem, threads) \
                                                 : skinny_attention_avx512(problem, threads);   \
    }
SKINNY_WITH(avx512bf16)
#if HAS_AMX
SKINNY_WITH(amx)
#endif
#undef SKINNY_WITH
