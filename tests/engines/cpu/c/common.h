/* Random operands and a comparison with sums in double, for the kernels' checks without Python. */
#include <math.h>
#include <stdio.h>

#include "simd.h"

static uint64_t state = 1;

static double uniform(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(state >> 40) / (1 << 24) * 2 - 1;
}

static int64_t between(int64_t low, int64_t high) {
    return low + (int64_t)((uniform() + 1) / 2 * (double)(high - low + 1));
}

/* `count` random numbers of the dtype; their values go to `values`. bfloat16 is cut, not rounded, and
 * float16 is drawn from the multiples of 1/1024 below 1, for which no conversion is needed here. */
static void fill(char *to, double *values, int64_t count, int dtype) {
    for (int64_t i = 0; i < count; i++) {
        float x = (float)uniform();
        uint32_t bits;
        if (dtype == SKINNY_FLOAT16) {
            const uint16_t fraction = (uint16_t)between(0, 1023);
            const uint16_t half = (uint16_t)(0x3800 | fraction); /* 0.5 to 1 */
            memcpy(to + 2 * i, &half, 2);
            values[i] = 0.5 + fraction / 2048.0;
            continue;
        }
        memcpy(&bits, &x, 4);
        if (dtype == SKINNY_BFLOAT16) bits &= 0xffff0000u;
        memcpy(&x, &bits, 4);
        values[i] = x;
        if (dtype == SKINNY_FLOAT32) {
            memcpy(to + 4 * i, &bits, 4);
        } else {
            bits >>= 16;
            const uint16_t half = (uint16_t)bits;
            memcpy(to + 2 * i, &half, 2);
        }
    }
}

static double read_one(const char *from, int64_t i, int dtype) {
    uint16_t half;
    uint32_t bits;
    float x;
    if (dtype == SKINNY_FLOAT32) {
        memcpy(&x, from + 4 * i, 4);
        return x;
    }
    memcpy(&half, from + 2 * i, 2);
    if (dtype == SKINNY_FLOAT16)
        return ldexp((half & 0x3ff) + (half & 0x7c00 ? 1024 : 0), (half >> 10 & 31) - (half & 0x7c00 ? 25 : 24)) *
               (half >> 15 ? -1 : 1);
    bits = (uint32_t)half << 16;
    memcpy(&x, &bits, 4);
    return x;
}

static int failures = 0;

/* `size`: the sum of the products' magnitudes. */
static void compare(const char *path, int dtype, double got, double expected, double size) {
    const double rounding[] = {0x1p-24, 0x1p-8, 0x1p-11};
    const double bound = 0x1p-15 * size + rounding[dtype] * (fabs(expected) + size * 0x1p-15);
    if (!(fabs(got - expected) <= bound) && failures++ < 5)
        printf("%s, dtype %d: expected %g, got %g\n", path, dtype, expected, got);
}
