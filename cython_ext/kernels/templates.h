/* The kernels for one instruction set. */
#include "lanes.h"
#include "tile_template.h"
#include "int8_template.h"
#include "int4_template.h"
#include "linear_template.h"
#include "attention_template.h"
#include "norm_template.h"
#include "element_template.h"
