/* Plain C for every other CPU and compiler: loops over 8 lanes, which compilers vectorise. */

#define ISA portable
#define TARGET
#define LANES 8
#define PANEL_ROWS 2
#define VEC skinny_lanes
#define ZERO() ((skinny_lanes){{0}})
#define LOAD(p) skinny_load_portable(p)
#define STORE(p, v) memcpy((p), (v).lane, sizeof((v).lane))
#define SET1(x) skinny_set_portable(x)
#define ADD(a, b) skinny_add_portable((a), (b))
#define MAX(a, b) skinny_max_portable((a), (b))
#define FMA(a, b, c) skinny_fma_portable((a), (b), (c))
#define POWER2(t) skinny_power2_portable(t)
#define PACKED_DTYPE SKINNY_FLOAT32
#define MULTIPLY_ADD(w, x, sum) FMA((w), (x), (sum))
#define LOAD_BF16(p) skinny_load_bf16_portable(p)
#define LOAD_F16(p) skinny_load_f16_portable(p)
#define STORE_BF16(p, v) skinny_store_bf16_portable((p), (v))
#define STORE_F16(p, v) skinny_store_f16_portable((p), (v))
#define SUM_LANES(a, b, c, d, out)                                                     \
    ((out)[0] = skinny_sum_portable(a), (out)[1] = skinny_sum_portable(b),             \
     (out)[2] = skinny_sum_portable(c), (out)[3] = skinny_sum_portable(d))

#define LOAD_INT8(p) skinny_load_int8_portable(p)
#define INT8_GROUP skinny_group_portable
#define LOAD_INT8_GROUP(p) skinny_load_group_portable(p)
#define INT8_GROUP_DOT(w, p) skinny_group_dot_portable((w), (p))

typedef struct {
    float lane[LANES];
} skinny_lanes;

typedef struct {
    int8_t weight[GROUP];
} skinny_group_portable;

static ALWAYS_INLINE skinny_lanes skinny_load_int8_portable(const char *p) {
    int8_t weight[LANES];
    skinny_lanes v;
    memcpy(weight, p, sizeof(weight));
    for (int i = 0; i < LANES; i++) v.lane[i] = weight[i];
    return v;
}

static ALWAYS_INLINE skinny_group_portable skinny_load_group_portable(const char *p) {
    skinny_group_portable group;
    memcpy(group.weight, p, sizeof(group.weight));
    return group;
}

static ALWAYS_INLINE skinny_lanes skinny_group_dot_portable(skinny_group_portable w, const char *p) {
    int16_t x[GROUP];
    int32_t sum[LANES] = {0};
    skinny_lanes v;
    memcpy(x, p, sizeof(x));
    for (int k = 0; k < GROUP; k += LANES)
        for (int i = 0; i < LANES; i++) sum[i] += w.weight[k + i] * x[k + i];
    for (int i = 0; i < LANES; i++) v.lane[i] = (float)sum[i];
    return v;
}

static ALWAYS_INLINE skinny_lanes skinny_load_portable(const float *p) {
    skinny_lanes v;
    memcpy(v.lane, p, sizeof(v.lane));
    return v;
}

static ALWAYS_INLINE skinny_lanes skinny_add_portable(skinny_lanes a, skinny_lanes b) {
    for (int i = 0; i < LANES; i++) a.lane[i] += b.lane[i];
    return a;
}

static ALWAYS_INLINE skinny_lanes skinny_set_portable(float x) {
    skinny_lanes v;
    for (int i = 0; i < LANES; i++) v.lane[i] = x;
    return v;
}

static ALWAYS_INLINE skinny_lanes skinny_max_portable(skinny_lanes a, skinny_lanes b) {
    for (int i = 0; i < LANES; i++) b.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
    return b;
}

static ALWAYS_INLINE skinny_lanes skinny_fma_portable(skinny_lanes a, skinny_lanes b, skinny_lanes c) {
    for (int i = 0; i < LANES; i++) c.lane[i] += a.lane[i] * b.lane[i];
    return c;
}

static ALWAYS_INLINE float skinny_sum_portable(skinny_lanes v) {
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) v.lane[i] += v.lane[i + width];
    return v.lane[0];
}

static ALWAYS_INLINE float skinny_float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static ALWAYS_INLINE uint32_t skinny_bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static ALWAYS_INLINE float skinny_float_of_bf16(uint16_t half) {
    return skinny_float_of((uint32_t)half << 16);
}

static ALWAYS_INLINE skinny_lanes skinny_power2_portable(skinny_lanes t) {
    for (int i = 0; i < LANES; i++)
        t.lane[i] = skinny_float_of((skinny_bits_of(t.lane[i]) + 127) << 23);
    return t;
}

/* To nearest, ties to even; a NaN becomes the quiet NaN, lest rounding carry it into infinity. */
static ALWAYS_INLINE uint16_t skinny_bf16_of(float value) {
    const uint32_t bits = skinny_bits_of(value);
    if (value != value) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* The exponent field is moved into place and rebiased by a multiplication, which also normalises
 * subnormal halves; infinities and NaNs are then given float32's highest exponent. */
static ALWAYS_INLINE float skinny_float_of_f16(uint16_t half) {
    const uint32_t magnitude = half & 0x7fffu, sign = (uint32_t)(half & 0x8000u) << 16;
    const float finite = skinny_float_of(magnitude << 13) * 0x1p112f;
    const uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0;
    return skinny_float_of(skinny_bits_of(finite) | special | sign);
}

/* To nearest, ties to even. Subnormal halves are rounded by adding 0.5, whose last bit is worth as
 * much as theirs; normal ones by an integer addition that carries into the exponent. */
static ALWAYS_INLINE uint16_t skinny_f16_of(float value) {
    const uint32_t bits = skinny_bits_of(value), magnitude = bits & 0x7fffffffu;
    const uint32_t sign = bits >> 16 & 0x8000u;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
    if (magnitude < 0x38800000u) {
        const uint32_t rounded = skinny_bits_of(skinny_float_of(magnitude) + 0.5f);
        return (uint16_t)(sign | (rounded - 0x3f000000u));
    }
    return (uint16_t)(sign | ((magnitude - 0x38000000u + 0xfff + (magnitude >> 13 & 1)) >> 13));
}

#define SKINNY_CONVERT_LANES(type)                                                          \
    static ALWAYS_INLINE skinny_lanes skinny_load_##type##_portable(const char *p) {        \
        skinny_lanes v;                                                                     \
        uint16_t half[LANES];                                                               \
        memcpy(half, p, sizeof(half));                                                      \
        for (int i = 0; i < LANES; i++) v.lane[i] = skinny_float_of_##type(half[i]);        \
        return v;                                                                           \
    }                                                                                       \
    static ALWAYS_INLINE void skinny_store_##type##_portable(char *p, skinny_lanes v) {     \
        uint16_t half[LANES];                                                               \
        for (int i = 0; i < LANES; i++) half[i] = skinny_##type##_of(v.lane[i]);            \
        memcpy(p, half, sizeof(half));                                                      \
    }
SKINNY_CONVERT_LANES(bf16)
SKINNY_CONVERT_LANES(f16)
#undef SKINNY_CONVERT_LANES

#include "templates.h"
#include "undef_vectors.h"
