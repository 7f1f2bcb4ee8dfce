/* What the kernels share: element types, register tiles, and how functions are named for each
 * instruction set. */
#ifndef SIMD_H
#define SIMD_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "openmp_runtime.h"

/* Weights alone may be int8, or the same in groups, each with a factor of its own. */
enum { SKINNY_FLOAT32, SKINNY_BFLOAT16, SKINNY_FLOAT16, SKINNY_INT8, SKINNY_GROUPED };

/* Rows of the streamed matrix in one register tile. */
#define TILE_ROWS 4
#define CACHE_LINE 64

/* TILE_ROWS rows of a streamed matrix times one panel. Of the streamed rows `fetch_first` to `fetch_end`,
 * what stands `ahead` bytes further on is fetched meanwhile.
 * sums[panel row * sums_stride + streamed row * sums_step]. */
typedef struct {
    const char *weight[TILE_ROWS];
    const char *panel;
    int64_t depth;
    int64_t ahead, fetch_first, fetch_end;
    float *sums;
    int64_t sums_stride, sums_step;
} skinny_tile;

static inline int64_t skinny_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t skinny_item_bytes(int dtype) {
    return dtype == SKINNY_FLOAT32 ? 4 : dtype >= SKINNY_INT8 ? 1 : 2;
}

#if defined(__GNUC__)
#define ALWAYS_INLINE inline __attribute__((always_inline))
#define PREFETCH(address) __builtin_prefetch((address), 0, 2) /* into the second-level cache */
#define FETCH_ADD(counter) __atomic_fetch_add((counter), 1, __ATOMIC_RELAXED)
#elif defined(_MSC_VER)
#include <intrin.h>
#define ALWAYS_INLINE __forceinline
#define PREFETCH(address) ((void)(address))
#define FETCH_ADD(counter) skinny_fetch_add(counter)
static __forceinline int64_t skinny_fetch_add(int64_t *counter) {
    return _InterlockedExchangeAdd64((volatile __int64 *)counter, 1);
}
#else
#error "expected a compiler with atomic additions: GCC, Clang or MSVC"
#endif

/* The cases of a switch over 1 to `count` rows, so that the compiler knows how many each has. */
#define CASES_2(CASE) CASE(1) CASE(2)
#define CASES_3(CASE) CASES_2(CASE) CASE(3)
#define CASES_5(CASE) CASES_3(CASE) CASE(4) CASE(5)
#define CASES_6(CASE) CASES_5(CASE) CASE(6)
#define CASES_(count, CASE) CASES_##count(CASE)
#define CASES(count, CASE) CASES_(count, CASE)

#define PASTE_(name, isa) skinny_##name##_##isa
#define PASTE(name, isa) PASTE_(name, isa)
#define NAMED(name) PASTE(name, ISA)

#endif
