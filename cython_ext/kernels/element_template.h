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

static ALWAYS_INLINE void table_row(int64_t count, const char *a, const char *table, char *out) {
    uint16_t index, value;
    for (int64_t i = 0; i < 2 * count; i += 2) {
        memcpy(&index, a + i, 2);
        memcpy(&value, table + 2 * (int64_t)index, 2);
        memcpy(out + i, &value, 2);
    }
}

/* Rows [first, end) of the last axis. */
static ALWAYS_INLINE void element_rows(const element_problem *p, int64_t first, int64_t end, const int kind,
                                       const int dtype) {
    const int64_t bytes = skinny_item_bytes(dtype);
    for (int64_t row = first; row < end; row++) {
        const char *a = p->a + element_place(p, 0, row) * bytes;
        const char *b = p->b + element_place(p, 1, row) * bytes;
        char *out = p->out + element_place(p, 2, row) * bytes;
        if (kind == ELEMENT_COPY)
            memcpy(out, a, p->shape[3] * bytes);
        else if (kind == ELEMENT_TABLE)
            table_row(p->shape[3], a, b, out);
        else
            element_row(kind, dtype, p->shape[3], a, b, out);
    }
}

#define ELEMENT_CASE(kind)                                       \
    case kind:                                                   \
        if (p->dtype == SKINNY_FLOAT32)                          \
            element_rows(p, first, end, kind, SKINNY_FLOAT32);   \
        else if (p->dtype == SKINNY_BFLOAT16)                    \
            element_rows(p, first, end, kind, SKINNY_BFLOAT16);  \
        else                                                     \
            element_rows(p, first, end, kind, SKINNY_FLOAT16);   \
        break;

static void element_chunk(void *of, int64_t chunk, int thread) {
    const element_problem *p = of;
    const int64_t rows = element_chunk_rows(p), first = chunk * rows;
    const int64_t end = skinny_min(first + rows, p->shape[0] * p->shape[1] * p->shape[2]);
    (void)thread;
    switch (p->kind) {
        ELEMENT_CASE(ELEMENT_COPY)
        ELEMENT_CASE(ELEMENT_NEG)
        ELEMENT_CASE(ELEMENT_MUL)
        ELEMENT_CASE(ELEMENT_ADD)
        ELEMENT_CASE(ELEMENT_TABLE)
    }
}

static work_step element_step(element_problem *p) {
    const int64_t rows = p->shape[0] * p->shape[1] * p->shape[2];
    return (work_step){.work = element_chunk, .of = p, .chunks = skinny_parts(rows, element_chunk_rows(p))};
}
