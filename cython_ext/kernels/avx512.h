/* AVX-512: 4 x 6 accumulators of 16 floats. */
#define VEC __m512
#define LANES 16
#define PANEL_ROWS 6
#define ZERO() _mm512_setzero_ps()
#define LOAD(p) _mm512_loadu_ps(p)
#define STORE(p, v) _mm512_storeu_ps((p), (v))
#define SET1(x) _mm512_set1_ps(x)
#define ADD(a, b) _mm512_add_ps((a), (b))
#define MUL(a, b) _mm512_mul_ps((a), (b))
#define MAX(a, b) _mm512_max_ps((a), (b))
#define FMA(a, b, c) _mm512_fmadd_ps((a), (b), (c))
#define LOAD_F16(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define STORE_F16(p, v) \
    _mm256_storeu_si256((__m256i *)(p), _mm512_cvtps_ph((v), _MM_FROUND_TO_NEAREST_INT))

typedef struct {
    __m512i low, high;
} int8_weights;
/* GCC copies sums in __m512i, of 64-bit integers, round every instruction. */
typedef int32_t int8_sums __attribute__((vector_size(64)));

static ALWAYS_INLINE int8_weights load_weights(const char *p) {
    const __m256i *from = (const __m256i *)p;
    return (int8_weights){_mm512_cvtepi8_epi16(_mm256_loadu_si256(from)),
                          _mm512_cvtepi8_epi16(_mm256_loadu_si256(from + 1))};
}

#ifndef ADD_PAIRS /* products of neighbours */
#define ADD_PAIRS(sums, a, b) _mm512_add_epi32((sums), _mm512_madd_epi16((a), (b)))
#endif

static ALWAYS_INLINE int8_sums add_products(int8_sums sums, int8_weights w, const char *x) {
    sums = (int8_sums)ADD_PAIRS((__m512i)sums, w.low, _mm512_loadu_si512(x));
    return (int8_sums)ADD_PAIRS((__m512i)sums, w.high, _mm512_loadu_si512(x + 64));
}

static ALWAYS_INLINE int8_sums no_sums(void) { return (int8_sums){0}; }
static ALWAYS_INLINE __m512 to_floats(int8_sums sums) { return _mm512_cvtepi32_ps((__m512i)sums); }

#ifndef ADD_FOURS /* products of 4 neighbours, the first ones without a sign */
#define ADD_FOURS(sums, w, x) \
    _mm512_add_epi32((sums), _mm512_madd_epi16(_mm512_maddubs_epi16((w), (x)), _mm512_set1_epi16(1)))
#endif

/* Products of the levels of half bytes with four numbers for each output. */
static ALWAYS_INLINE int8_sums add_halves(int8_sums sums, __m512i halves, const char *x) {
    const __m512i levels = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)int4_levels));
    int32_t four;
    memcpy(&four, x, 4);
    const __m512i w = _mm512_shuffle_epi8(levels, _mm512_and_si512(halves, _mm512_set1_epi8(15)));
    return (int8_sums)ADD_FOURS((__m512i)sums, w, _mm512_set1_epi32(four));
}

static ALWAYS_INLINE int8_sums add_int4(int8_sums sums, const char *w, const char *x) {
    const __m512i halves = _mm512_loadu_si512(w);
    return add_halves(add_halves(sums, halves, x), _mm512_srli_epi16(halves, 4), x + 4);
}

static ALWAYS_INLINE __m512 load_int8(const char *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

static ALWAYS_INLINE __m512 load_bf16(const char *p) {
    const __m256i half = _mm256_loadu_si256((const __m256i *)p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* Round to nearest, ties to even; a NaN becomes the quiet NaN, lest it be carried into infinity. */
static ALWAYS_INLINE void store_bf16(char *p, __m512 v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    rounded = _mm512_mask_set1_epi32(rounded, nan, 0x7fc00000);
    const __m256i half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
    _mm256_storeu_si256((__m256i *)p, half);
}

static ALWAYS_INLINE __m512 power2(__m512 t) {
    const __m512i exponent = _mm512_add_epi32(_mm512_castps_si512(t), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
}

/* Quarters of a, b, c and d are added in pairs and come to lie side by side, then their elements are. */
static ALWAYS_INLINE __m512 add_quarters(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

static ALWAYS_INLINE void sum_lanes(__m512 a, __m512 b, __m512 c, __m512 d, float *out) {
    const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
    __m512 sums = add_quarters(add_quarters(a, b), add_quarters(c, d));
    sums = _mm512_add_ps(sums, _mm512_permute_ps(sums, 0xb1));
    sums = _mm512_add_ps(sums, _mm512_permute_ps(sums, 0x4e));
    _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, sums)));
}
