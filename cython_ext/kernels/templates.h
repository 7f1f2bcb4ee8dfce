/* The kernels for one instruction set. */
#include "lanes.h"
#include "tile_template.h"
#include "int8_template.h"
#include "int4_template.h"
#include "linear_template.h"
#include "attention_template.h"
#include "norm_template.h"
#include "element_template.h"

#define OWN_FUNCTIONS                                                                                    \
    plan_linears, add_linears, plan_attention, add_attention, norm_step, element_step, int8_step, int4_step
