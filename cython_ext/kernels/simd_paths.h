/* Compiles KERNEL_TEMPLATE, which defines `int NAMED(run)(const KERNEL_PROBLEM *, int threads)`, once
 * for each instruction set, with function-level targets. The set is chosen at run time: one binary
 * serves every CPU of its architecture. */
#include "skinny_portable.h"
#if defined(__GNUC__) && defined(__x86_64__)
#include "skinny_avx2.h"
#include "skinny_avx512.h"
#elif defined(__GNUC__) && defined(__aarch64__)
#include "skinny_neon.h"
#endif

typedef int (*skinny_entry)(const KERNEL_PROBLEM *, int threads);
typedef struct {
    const char *name;
    skinny_entry run;
} skinny_path;

/* The instruction sets this CPU has, slowest first. Returns how many were written to `paths`. */
static int skinny_paths(skinny_path paths[4]) {
    int count = 0;
    paths[count++] = (skinny_path){"portable", skinny_run_portable};
#if defined(__GNUC__) && defined(__x86_64__)
    if (skinny_cpu_has_avx2()) paths[count++] = (skinny_path){"avx2", skinny_run_avx2};
    if (skinny_cpu_has_avx512()) paths[count++] = (skinny_path){"avx512", skinny_run_avx512};
    if (skinny_cpu_has_avx512bf16())
        paths[count++] = (skinny_path){"avx512bf16", skinny_run_with_avx512bf16};
#elif defined(__GNUC__) && defined(__aarch64__)
    paths[count++] = (skinny_path){"neon", skinny_run_neon};
#endif
    return count;
}
