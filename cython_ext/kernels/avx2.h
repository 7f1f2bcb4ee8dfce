/* AVX2 with FMA and half-precision conversion: 4 x 3 accumulators of 8 floats. */
#define VEC __m256
#define LANES 8
#define PANEL_ROWS 3
#define ZERO() _mm256_setzero_ps()
#define LOAD(p) _mm256_loadu_ps(p)
#define STORE(p, v) _mm256_storeu_ps((p), (v))
#define SET1(x) _mm256_set1_ps(x)
#define ADD(a, b) _mm256_add_ps((a), (b))
#define MUL(a, b) _mm256_mul_ps((a), (b))
#define MAX(a, b) _mm256_max_ps((a), (b))
#define FMA(a, b, c) _mm256_fmadd_ps((a), (b), (c))
#define LOAD_F16(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define STORE_F16(p, v) \
    _mm_storeu_si128((__m128i *)(p), _mm256_cvtps_ph((v), _MM_FROUND_TO_NEAREST_INT))

typedef struct {
    __m256i part[4];
} int8_weights;
typedef __m256i int8_sums;

static ALWAYS_INLINE int8_weights load_weights(const char *p) {
    const __m128i *from = (const __m128i *)p;
    int8_weights w;
    for (int i = 0; i < 4; i++) w.part[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128(from + i));
    return w;
}

static ALWAYS_INLINE __m256i add_products(__m256i sums, int8_weights w, const char *x) {
    const __m256i *from = (const __m256i *)x;
    for (int i = 0; i < 4; i++)
        sums = _mm256_add_epi32(sums, _mm256_madd_epi16(w.part[i], _mm256_loadu_si256(from + i)));
    return sums;
}

static ALWAYS_INLINE __m256i no_sums(void) { return _mm256_setzero_si256(); }
static ALWAYS_INLINE __m256 to_floats(__m256i sums) { return _mm256_cvtepi32_ps(sums); }

/* Products of the levels of half bytes with four numbers for each output. Those of two neighbours fit 16 bits. */
static ALWAYS_INLINE __m256i add_halves(__m256i sums, __m256i halves, const char *x) {
    const __m256i levels = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)int4_levels));
    int32_t four;
    memcpy(&four, x, 4);
    const __m256i w = _mm256_shuffle_epi8(levels, _mm256_and_si256(halves, _mm256_set1_epi8(15)));
    const __m256i pairs = _mm256_maddubs_epi16(w, _mm256_set1_epi32(four));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

static ALWAYS_INLINE __m256i add_int4(__m256i sums, const char *w, const char *x) {
    const __m256i halves = _mm256_loadu_si256((const __m256i *)w);
    return add_halves(add_halves(sums, halves, x), _mm256_srli_epi16(halves, 4), x + 4);
}

static ALWAYS_INLINE __m256 load_int8(const char *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}

static ALWAYS_INLINE __m256 load_bf16(const char *p) {
    const __m128i half = _mm_loadu_si128((const __m128i *)p);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

/* Round to nearest, ties to even; a NaN becomes the quiet NaN, lest it be carried into infinity. */
static ALWAYS_INLINE void store_bf16(char *p, __m256 v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256 quiet = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
    const __m256 nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
    const __m256 chosen = _mm256_blendv_ps(_mm256_castsi256_ps(rounded), quiet, nan);
    const __m256i words = _mm256_srli_epi32(_mm256_castps_si256(chosen), 16);
    /* Packing works within 128-bit halves; the permutation brings both to the front. */
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(packed));
}

static ALWAYS_INLINE __m256 power2(__m256 t) {
    const __m256i exponent = _mm256_add_epi32(_mm256_castps_si256(t), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}

static ALWAYS_INLINE void sum_lanes(__m256 a, __m256 b, __m256 c, __m256 d, float *out) {
    const __m256 abcd = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
}
