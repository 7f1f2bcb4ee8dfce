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
    const int64_t *shape = p->shape, bytes = skinny_item_bytes(dtype);
    for (int64_t i = 0; i < shape[0] * shape[1] * shape[2]; i++) {
        const int64_t at[3] = {i / shape[2] / shape[1], i / shape[2] % shape[1], i % shape[2]};
        int64_t place[3] = {0};
        for (int tensor = 0; tensor < 3; tensor++)
            for (int axis = 0; axis < 3; axis++) place[tensor] += at[axis] * p->strides[tensor][axis] * bytes;
        if (kind == ELEMENT_COPY)
            memcpy(p->out + place[2], p->a + place[0], shape[3] * bytes);
        else
            element_row(kind, dtype, shape[3], p->a + place[0], p->b + place[1], p->out + place[2]);
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
