/* NEON, which every arm64 CPU has: 4 x 5 accumulators of 4 floats. */
#include "paths.h"

#ifdef ARM_PATHS
#include <arm_neon.h>

#define VEC float32x4_t
#define LANES 4
#define PANEL_ROWS 5
#define ZERO() vdupq_n_f32(0.0f)
#define LOAD(p) vld1q_f32(p)
#define STORE(p, v) vst1q_f32((p), (v))
#define SET1(x) vdupq_n_f32(x)
#define ADD(a, b) vaddq_f32((a), (b))
#define MUL(a, b) vmulq_f32((a), (b))
#define MAX(a, b) vmaxq_f32((a), (b))
#define FMA(a, b, c) vfmaq_f32((c), (a), (b))
#define LOAD_F16(p) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)(p))))
#define STORE_F16(p, v) vst1_u16((uint16_t *)(p), vreinterpret_u16_f16(vcvt_f16_f32(v)))
#define PACKED_DTYPE SKINNY_FLOAT32
#define MULTIPLY_ADD(w, x, sum) FMA((w), (x), (sum))

typedef struct {
    int16x8_t part[8];
} int8_weights;
typedef int32x4_t int8_sums;

static ALWAYS_INLINE float32x4_t load_int8(const char *p) {
    uint32_t bytes;
    memcpy(&bytes, p, 4);
    const int16x8_t words = vmovl_s8(vcreate_s8(bytes));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(words)));
}

static ALWAYS_INLINE int8_weights load_weights(const char *p) {
    int8_weights w;
    for (int i = 0; i < 8; i++) w.part[i] = vmovl_s8(vld1_s8((const int8_t *)p + 8 * i));
    return w;
}

static ALWAYS_INLINE int32x4_t add_products(int32x4_t sums, int8_weights w, const char *p) {
    for (int i = 0; i < 8; i++) {
        const int16x8_t x = vld1q_s16((const int16_t *)p + 8 * i);
        sums = vmlal_s16(sums, vget_low_s16(w.part[i]), vget_low_s16(x));
        sums = vmlal_s16(sums, vget_high_s16(w.part[i]), vget_high_s16(x));
    }
    return sums;
}

static ALWAYS_INLINE int32x4_t no_sums(void) { return vdupq_n_s32(0); }
static ALWAYS_INLINE float32x4_t to_floats(int32x4_t sums) { return vcvtq_f32_s32(sums); }

/* Products of the levels of half bytes with four numbers for each output. Those of two neighbours fit 16 bits. */
static ALWAYS_INLINE int32x4_t add_halves(int32x4_t sums, uint8x16_t halves, const char *x) {
    int32_t four;
    memcpy(&four, x, 4);
    const int8x16_t w = vreinterpretq_s8_u8(vqtbl1q_u8(vld1q_u8(int4_levels), halves));
    const int8x16_t fours = vreinterpretq_s8_s32(vdupq_n_s32(four));
    const int16x8_t first = vmull_s8(vget_low_s8(w), vget_low_s8(fours));
    return vpadalq_s16(sums, vpaddq_s16(first, vmull_s8(vget_high_s8(w), vget_high_s8(fours))));
}

static ALWAYS_INLINE int32x4_t add_int4(int32x4_t sums, const char *w, const char *x) {
    const uint8x16_t halves = vld1q_u8((const uint8_t *)w);
    return add_halves(add_halves(sums, vandq_u8(halves, vdupq_n_u8(15)), x), vshrq_n_u8(halves, 4), x + 4);
}

/* Round to nearest, ties to even; a NaN becomes the quiet NaN, lest it be carried into infinity. */
static ALWAYS_INLINE void store_bf16(char *p, float32x4_t v) {
    const uint32x4_t bits = vreinterpretq_u32_f32(v);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t number = vceqq_f32(v, v);
    const uint32x4_t chosen = vbslq_u32(number, rounded, vdupq_n_u32(0x7fc00000));
    vst1_u16((uint16_t *)p, vshrn_n_u32(chosen, 16));
}

static ALWAYS_INLINE float32x4_t power2(float32x4_t t) {
    const uint32x4_t exponent = vaddq_u32(vreinterpretq_u32_f32(t), vdupq_n_u32(127));
    return vreinterpretq_f32_u32(vshlq_n_u32(exponent, 23));
}

static ALWAYS_INLINE float32x4_t load_bf16(const char *p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t *)p), 16));
}

static ALWAYS_INLINE void sum_lanes(float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d, float *out) {
    vst1q_f32(out, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
}

#include "templates.h"

const kernel_path neon_path = {"neon", NULL, OWN_FUNCTIONS};
#endif
