/* Operators of single elements for one instruction set; see element_kernels.h. */

static ALWAYS_INLINE VEC element(const int kind, VEC a, VEC b) {
    if (kind == ELEMENT_NEG) return MUL(a, SET1(-1.0f));
    return kind == ELEMENT_MUL ? MUL(a, b) : ADD(a, b);
}

static ALWAYS_INLINE void element_row(const int kind, const int dtype, int64_t count, const char *a, const char *b,
                                      char *out) {
    const int64_t bytes = skinny_item_bytes(dtype), step = LANES * bytes;
    char ends[3][LANES * 4] = {{0}};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES, a += step, b += step, out += step)
        write_lanes(out, element(kind, read_lanes(a, dtype), read_lanes(b, dtype)), dtype);
    if (i == count) return;
    memcpy(ends[0], a, (count - i) * bytes);
    memcpy(ends[1], b, (count - i) * bytes);
    write_lanes(ends[2], element(kind, read_lanes(ends[0], dtype), read_lanes(ends[1], dtype)), dtype);
    memcpy(out, ends[2], (count - i) * bytes);
}

static ALWAYS_INLINE void element_rows(const element_problem *p, const int kind, const int dtype) {
    const int64_t bytes = skinny_item_bytes(dtype);
    for (int64_t i = 0; i < p->shape[0]; i++)
        for (int64_t j = 0; j < p->shape[1]; j++)
            for (int64_t k = 0; k < p->shape[2]; k++) {
                const char *a = p->a + element_place(p->strides[0], i, j, k) * bytes;
                const char *b = p->b + element_place(p->strides[1], i, j, k) * bytes;
                char *out = p->out + element_place(p->strides[2], i, j, k) * bytes;
                if (kind == ELEMENT_COPY)
                    memcpy(out, a, p->shape[3] * bytes);
                else
                    element_row(kind, dtype, p->shape[3], a, b, out);
            }
}

#define ELEMENT_CASE(kind)                                    \
    case kind:                                                \
        if (p->dtype == SKINNY_FLOAT32)                       \
            element_rows(p, kind, SKINNY_FLOAT32);            \
        else if (p->dtype == SKINNY_BFLOAT16)                 \
            element_rows(p, kind, SKINNY_BFLOAT16);           \
        else                                                  \
            element_rows(p, kind, SKINNY_FLOAT16);            \
        break;

static void elements(const element_problem *p) {
    switch (p->kind) {
        ELEMENT_CASE(ELEMENT_COPY)
        ELEMENT_CASE(ELEMENT_NEG)
        ELEMENT_CASE(ELEMENT_MUL)
        ELEMENT_CASE(ELEMENT_ADD)
    }
}
