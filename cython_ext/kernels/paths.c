#include "paths.h"
#include "norm_template.h"

#ifdef X86_PATHS
#include <cpuid.h>

/* Half-precision conversion has a CPUID bit, but not every compiler's builtin knows its name. */
static int has_f16c(void) {
    unsigned int a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

int kernel_paths(kernel_path paths[MAX_PATHS]) {
    int count = 0;
#ifdef X86_PATHS
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c()) return 0;
    paths[count++] = avx2_path;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw")) return count;
    paths[count++] = avx512_path;
    if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vnni")) return count;
    paths[count++] = avx512bf16_path;
#ifdef AMX_PATH
    if (has_amx()) paths[count++] = with_amx(avx512bf16_path);
#endif
#elif defined(ARM_PATHS)
    paths[count++] = neon_path;
#else
    (void)paths;
#endif
    return count;
}

void plain_norm(norm_problem *p) { run_alone(norm_step(p)); }
