/* Ends a kernel's template for one instruction set. */
#undef STEP
#undef STEP_BYTES
#undef TILE_CASE
#undef ISA
#undef TARGET
#undef PACKED_DTYPE
#undef MULTIPLY_ADD
