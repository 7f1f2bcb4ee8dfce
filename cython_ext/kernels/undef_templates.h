/* Ends the templates for one instruction set. */
#undef STEP
#undef STEP_BYTES
#undef TILE_CASE
#undef OUTPUT_CASE
#undef ISA
#undef TARGET
#undef PACKED_DTYPE
#undef MULTIPLY_ADD
#undef OWN_TILES
#undef AMX_ROWS
#undef PANEL_COUNT
#undef PACKED_ROWS
#undef BEGIN_THREAD
#undef END_THREAD
