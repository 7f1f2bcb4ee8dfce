/* What the kernels share: element types, conversions of single numbers, register tiles. */
#ifndef SIMD_H
#define SIMD_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "openmp_runtime.h"
#include "steps.h"

/* Weights alone may be int8; by SKINNY_ROUNDED, and of weights in four bits, x is rounded to integers too. */
enum { SKINNY_FLOAT32, SKINNY_BFLOAT16, SKINNY_FLOAT16, SKINNY_INT8, SKINNY_ROUNDED, SKINNY_INT4 };

/* Rows of the streamed matrix in one register tile. */
#define TILE_ROWS 4
#define CACHE_LINE 64

/* TILE_ROWS rows of a streamed matrix times one panel. Rows begin `weight_step` bytes apart; `last` is the last there
 * is, and stands for those behind it. Meanwhile, with each step of the depth, what stands at `fetch` and
 * `fetch_again` bytes further is fetched and, unless `fetch_apart` is 0, what stands so far behind both; `fetch` moves
 * on by `fetch_step`. sums[panel row * sums_stride + streamed row * sums_step]. */
typedef struct {
    const char *weight, *last, *panel, *fetch;
    int64_t weight_step, depth, fetch_again, fetch_apart, fetch_step;
    float *sums;
    int64_t sums_stride, sums_step;
} skinny_tile;

static inline int64_t skinny_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t skinny_most(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t skinny_parts(int64_t all, int64_t part) { return (all + part - 1) / part; }
static inline int64_t skinny_item_bytes(int dtype) {
    return dtype == SKINNY_FLOAT32 ? 4 : dtype >= SKINNY_INT8 ? 1 : 2;
}

#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#elif defined(__GNUC__)
#define UNROLL _Pragma("GCC unroll 8") /* before accumulators are given registers */
#endif
#if defined(__GNUC__)
#define ALWAYS_INLINE inline __attribute__((always_inline))
#define PREFETCH(address) __builtin_prefetch((address), 0, 2) /* into all caches but the smallest */
#define FETCH_ADD(counter) __atomic_fetch_add((counter), 1, __ATOMIC_RELAXED)
#define ADD_RELEASE(counter) __atomic_fetch_add((counter), 1, __ATOMIC_RELEASE)
#define LOAD_ACQUIRE(counter) __atomic_load_n((counter), __ATOMIC_ACQUIRE)
#else
#error "expected GCC or Clang"
#endif

/* Whether there are so many rows. A switch would become a jump to a computed address, before which some virtual
 * machines let a CPU wait for all that was begun. */
static ALWAYS_INLINE int are_rows(int64_t rows, int64_t many) {
    __asm__("" : "+r"(rows)); /* keeps compilers from making one of several comparisons */
    return rows == many;
}

/* The cases of 1 to `count` rows, so that the compiler knows how many each has. */
#define CASES_2(CASE) CASE(1) CASE(2)
#define CASES_3(CASE) CASES_2(CASE) CASE(3)
#define CASES_5(CASE) CASES_3(CASE) CASE(4) CASE(5)
#define CASES_6(CASE) CASES_5(CASE) CASE(6)
#define CASES_(count, CASE) CASES_##count(CASE)
#define CASES(count, CASE) CASES_(count, CASE)

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

static ALWAYS_INLINE float skinny_float_of_bf16(uint16_t half) { return skinny_float_of((uint32_t)half << 16); }

/* Round to nearest, ties to even; a NaN becomes the quiet NaN, lest it be carried into infinity. */
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

/* Round to nearest, ties to even. Subnormal halves are rounded by adding 0.5, whose last bit is worth as
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

#endif
