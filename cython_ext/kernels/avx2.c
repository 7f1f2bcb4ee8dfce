#include "paths.h"

#ifdef X86_PATHS
#include <immintrin.h>
#define TARGET "avx2,fma,f16c"
#include "target_begin.h"
#include "avx2.h"

#define PACKED_DTYPE SKINNY_FLOAT32
#define MULTIPLY_ADD(w, x, sum) FMA((w), (x), (sum))
#include "templates.h"

static int linear_by_dtype(const linear_problem *p, int count, int threads) {
    const int pairs = p->weight_dtype == SKINNY_BFLOAT16 && p->dtype == SKINNY_BFLOAT16;
    return pairs ? avx2_pairs_path.linear(p, count, threads) : linear(p, count, threads);
}

static int attention_by_dtype(const attention_problem *p, int threads) {
    return p->dtype == SKINNY_BFLOAT16 ? avx2_pairs_path.attention(p, threads) : attention(p, threads);
}

const kernel_path avx2_path = {"avx2", linear_by_dtype, attention_by_dtype, pack_int8, norm, elements};
TARGET_END
#endif
