/* The kernels for one instruction set, which then forgets its name and its multiplication. */
#include "tile_template.h"
#include "int8_template.h"
#include "linear_template.h"
#include "attention_template.h"
#include "undef_templates.h"
