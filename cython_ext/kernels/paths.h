/* The kernels for every instruction set, with function-level targets. The set is chosen at run time:
 * one binary serves every CPU of its architecture. */
#ifndef PATHS_H
#define PATHS_H

#include "attention_kernels.h"
#include "linear_kernels.h"

#if defined(__linux__) && defined(__x86_64__) && defined(__has_include)
#if __has_include(<amxbf16intrin.h>)
#define HAS_AMX 1
#endif
#endif

#include "portable.h"
#if defined(__GNUC__) && defined(__x86_64__)
#include "avx2.h"
#include "avx512.h"
#elif defined(__GNUC__) && defined(__aarch64__)
#include "neon.h"
#endif

typedef struct {
    const char *name;
    int (*linear)(const linear_problem *, int threads);
    int (*attention)(const attention_problem *, int threads);
    void (*pack_int8)(int8_packing *, int threads);
} kernel_path;

#define MAX_PATHS 5

/* The instruction sets this CPU has, slowest first. Returns how many were written to `paths`. */
static int kernel_paths(kernel_path paths[MAX_PATHS]) {
    int count = 0;
    paths[count++] = (kernel_path){"portable", skinny_linear_portable, skinny_attention_portable,
                                      skinny_pack_int8_portable};
#if defined(__GNUC__) && defined(__x86_64__)
    if (skinny_cpu_has_avx2())
        paths[count++] = (kernel_path){"avx2", skinny_linear_avx2, skinny_attention_avx2,
                                      skinny_pack_int8_avx2};
    if (skinny_cpu_has_avx512())
        paths[count++] = (kernel_path){"avx512", skinny_linear_avx512, skinny_attention_avx512,
                                      skinny_pack_int8_avx512};
    if (skinny_cpu_has_avx512bf16())
        paths[count++] = (kernel_path){"avx512bf16", skinny_linear_with_avx512bf16,
                                      skinny_attention_with_avx512bf16,
                                      skinny_pack_int8_avx512bf16};
#if HAS_AMX
    if (skinny_cpu_has_amx())
        paths[count++] = (kernel_path){"amx", skinny_linear_with_amx, skinny_attention_with_amx,
                                      skinny_pack_int8_avx512bf16};
#endif
#elif defined(__GNUC__) && defined(__aarch64__)
    paths[count++] = (kernel_path){"neon", skinny_linear_neon, skinny_attention_neon,
                                      skinny_pack_int8_neon};
#endif
    return count;
}

#endif
