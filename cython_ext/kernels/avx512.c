#include "paths.h"

#ifdef X86_PATHS
#include <immintrin.h>
#define TARGET "avx512f,avx512bw,avx2,fma,f16c"
#include "target_begin.h"
#include "avx512.h"

#define PACKED_DTYPE SKINNY_FLOAT32
#define MULTIPLY_ADD(w, x, sum) FMA((w), (x), (sum))
#include "templates.h"

const kernel_path avx512_path = {"avx512", NULL, OWN_FUNCTIONS};
TARGET_END
#endif
