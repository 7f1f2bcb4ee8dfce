/* LANES numbers of any element type from and to memory, for one instruction set; see tile_template.h. */

static ALWAYS_INLINE VEC read_lanes(const char *from, int dtype) {
    if (dtype == SKINNY_FLOAT32) return LOAD((const float *)from);
    if (dtype == SKINNY_INT8) return load_int8(from);
    return dtype == SKINNY_BFLOAT16 ? load_bf16(from) : LOAD_F16(from);
}

static ALWAYS_INLINE void write_lanes(char *to, VEC value, int dtype) {
    if (dtype == SKINNY_FLOAT32)
        STORE((float *)to, value);
    else if (dtype == SKINNY_BFLOAT16)
        store_bf16(to, value);
    else
        STORE_F16(to, value);
}
