#include "paths.h"

#ifdef X86_PATHS
#include <immintrin.h>
#define TARGET "avx2,fma,f16c"
#include "target_begin.h"
#include "avx2.h"

#define PACKED_DTYPE SKINNY_FLOAT32
#define MULTIPLY_ADD(w, x, sum) FMA((w), (x), (sum))
#include "templates.h"

static const kernel_path *path_of(int dtype, int weight_dtype) {
    return dtype == SKINNY_BFLOAT16 && weight_dtype == dtype ? &avx2_pairs_path : &avx2_path;
}

const kernel_path avx2_path = {"avx2", path_of, OWN_FUNCTIONS};
TARGET_END
#endif
