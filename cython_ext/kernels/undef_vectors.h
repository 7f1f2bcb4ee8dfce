/* Ends an instruction set: its vectors are forgotten before the next one defines its own. */
#undef VEC
#undef LANES
#undef PANEL_ROWS
#undef ZERO
#undef SET1
#undef LOAD
#undef STORE
#undef ADD
#undef MAX
#undef FMA
#undef POWER2
#undef LOAD_BF16
#undef LOAD_F16
#undef STORE_BF16
#undef STORE_F16
#undef SUM_LANES
