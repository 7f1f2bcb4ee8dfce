#include "paths.h"

#ifdef X86_PATHS
#include <immintrin.h>
#define TARGET "avx512f,avx512bw,avx2,fma,f16c"
#include "target_begin.h"
#include "avx512.h"

#define PACKED_DTYPE SKINNY_FLOAT32
#define MULTIPLY_ADD(w, x, sum) FMA((w), (x), (sum))
#include "templates.h"

const kernel_path avx512_path = {"avx512", plan_linears, add_linears, plan_attention, add_attention, norm_step, element_step, pack_int8, pack_int4};
TARGET_END
#endif
