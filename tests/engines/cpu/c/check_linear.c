/* Every instruction set's linear layer against sums in double, over random shapes. */
#define _DEFAULT_SOURCE /* mmap of no file */
#include <sys/mman.h>

#include "common.h"
#include "program.h"

#define GUARD 64 /* bytes on either side of an output, which nobody may write to */

#define GAP (1 << 16) /* bytes; no page is larger */

/* Memory behind which nobody may read. */
static char *before_a_gap(int64_t bytes, int64_t *mapped) {
    const int64_t pages = skinny_parts(bytes, GAP) * GAP;
    char *all = mmap(NULL, pages + GAP, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED || mprotect(all + pages, GAP, PROT_NONE)) abort();
    *mapped = pages + GAP;
    return all + pages - bytes;
}

static void check(kernel_path path, int dtype) {
    const int64_t rows = between(1, 70), depth = between(1, 200), outputs = between(1, 140);
    int64_t mapped, bytes = outputs * depth * skinny_item_bytes(dtype);
    char *x = malloc(rows * depth * 4), *w = before_a_gap(bytes, &mapped);
    char *bias = malloc(outputs * 4), *y = malloc(rows * outputs * 4 + 2 * GUARD);
    double *xs = malloc(rows * depth * 8), *ws = malloc(outputs * depth * 8);
    double *biases = malloc(outputs * 8);
    fill(x, xs, rows * depth, dtype);
    fill(w, ws, outputs * depth, dtype);
    fill(bias, biases, outputs, dtype);
    memset(y, 7, rows * outputs * 4 + 2 * GUARD);
    y += GUARD;
    linear_problem problem = {x, w, bias, y, rows, depth, outputs, depth, depth, outputs, dtype, dtype,
                              NULL, 0};
    run_linears(&problem, 1, &path, 1);
    for (int64_t i = 1; i <= GUARD; i++)
        if (y[-i] != 7 || y[rows * outputs * skinny_item_bytes(dtype) + i - 1] != 7)
            failures++, printf("%s: wrote beside the output\n", path.name);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t o = 0; o < outputs; o++) {
            double sum = biases[o], size = fabs(sum);
            for (int64_t k = 0; k < depth; k++) {
                const double product = xs[r * depth + k] * ws[o * depth + k];
                sum += product, size += fabs(product);
            }
            compare(path.name, dtype, read_one(y, r * outputs + o, dtype), sum, size);
        }
    munmap(w + bytes - mapped + GAP, mapped);
    free(x), free(bias), free(y - GUARD), free(xs), free(ws), free(biases);
}

/* The same of weights in eight bits and scales of the rows. */
static void check_int8(kernel_path path, int dtype) {
    const int64_t rows = between(1, 70), depth = between(1, 200), outputs = between(1, 140);
    char *x = malloc(rows * depth * 4), *scales = malloc(outputs * 4), *y = malloc(rows * outputs * 4);
    double *xs = malloc(rows * depth * 8), *factors = malloc(outputs * 8);
    int8_t *values = malloc(outputs * depth);
    fill(x, xs, rows * depth, dtype);
    fill(scales, factors, outputs, dtype);
    for (int64_t i = 0; i < outputs * depth; i++) values[i] = (int8_t)between(-128, 127);
    linear_problem problem = {x, (char *)values, NULL, y, rows, depth, outputs, depth, depth, outputs,
                              dtype, SKINNY_INT8, scales, dtype};
    run_linears(&problem, 1, &path, 1);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t o = 0; o < outputs; o++) {
            double sum = 0, size = 0;
            for (int64_t k = 0; k < depth; k++) {
                const double product = xs[r * depth + k] * factors[o] * values[o * depth + k];
                sum += product, size += fabs(product);
            }
            compare(path.name, dtype, read_one(y, r * outputs + o, dtype), sum, size);
        }
    free(x), free(scales), free(y), free(xs), free(factors), free(values);
}

/* The same of weights that the kernel has rounded, and of x in integers. */
static void check_rounded(kernel_path path, int dtype) {
    const int64_t rows = between(1, 70), depth = between(1, 1200), outputs = between(1, 140);
    const int64_t stride = (depth + INT8_STEP - 1) / INT8_STEP * INT8_STEP;
    char *x = malloc(rows * depth * 4), *w = malloc(outputs * depth * 4), *y = malloc(rows * outputs * 4);
    double *xs = malloc(rows * depth * 8), *ws = malloc(outputs * depth * 8);
    int8_t *values = malloc(outputs * stride);
    float *scales = malloc(outputs * 4), *norms = malloc(outputs * 8);
    fill(x, xs, rows * depth, dtype);
    fill(w, ws, outputs * depth, dtype);
    weight_packing packing = {w, outputs, depth, depth, dtype, (char *)values, scales, norms, norms + outputs, NULL};
    run_alone(path.int8_step(&packing));
    linear_problem problem = {x, (char *)values, NULL, y, rows, depth, outputs, depth, stride,
                              outputs, dtype, SKINNY_ROUNDED, (char *)scales, SKINNY_FLOAT32};
    run_linears(&problem, 1, &path, 1);
    for (int64_t o = 0; o < outputs; o++) {
        double left_out = 0;
        for (int64_t k = 0; k < depth; k++) {
            const double rounded = (double)scales[o] * values[o * stride + k];
            left_out += (ws[o * depth + k] - rounded) * (ws[o * depth + k] - rounded);
            ws[o * depth + k] = rounded;
        }
        compare(path.name, SKINNY_FLOAT32, norms[o], sqrt(left_out), 1);
        for (int64_t r = 0; r < rows; r++) {
            double sum = 0, size = 0;
            for (int64_t k = 0; k < depth; k++) {
                sum += xs[r * depth + k] * ws[o * depth + k];
                size += 2.01 * fabs(ws[o * depth + k]); /* no x is greater than 1, or rounded by more than 2^-14 */
            }
            compare(path.name, dtype, read_one(y, r * outputs + o, dtype), sum, size);
        }
    }
    free(x), free(w), free(y), free(xs), free(ws), free(values), free(scales), free(norms);
}

/* The nearest multiple of a scale, found in float. */
static double rounded(double x, float scale) { return scale == 0 ? 0 : scale * rintf((float)x * (1 / scale)); }

/* What the kernel's rounding to four bits has made of a weight. */
static double read_int4(const char *blocks, int64_t groups, int64_t output, int64_t column) {
    const int64_t group = column / INT4_GROUP, k = column % INT4_GROUP, o = output % INT4_ROWS;
    const char *block = blocks + (output / INT4_ROWS * groups + group) * INT4_BLOCK_BYTES;
    const uint8_t both = (uint8_t)block[INT4_ROWS * 2 + (k / 8 * INT4_ROWS + o) * 4 + k % 4];
    return (int4_levels[k % 8 < 4 ? both & 15 : both >> 4] - INT4_ZERO) * read_one(block, o, SKINNY_FLOAT16);
}

/* The nearest level times a scale, to whose half a number is rounded before. */
static double nearest(double x, float scale) {
    const double units = 0.5 * rintf(2 * (1 / scale) * (float)x);
    int number = 0;
    for (int k = 1; k < 16; k++) number += units > 0.5 * (int4_levels[k - 1] + int4_levels[k]) - INT4_ZERO;
    return scale * (double)(int4_levels[number] - INT4_ZERO);
}

/* The same of weights in four bits, whose groups have scales of their own, as those of x have. */
static void check_int4(kernel_path path, int dtype) {
    const int64_t rows = between(1, 70), depth = between(1, 300), outputs = between(1, 140);
    const int64_t groups = skinny_parts(depth, INT4_GROUP);
    const int64_t bytes = skinny_parts(outputs, INT4_ROWS) * groups * INT4_BLOCK_BYTES;
    char *x = malloc(rows * depth * 4), *w = malloc(outputs * depth * 4), *y = malloc(rows * outputs * 4);
    char *blocks = malloc(bytes + 2 * GUARD);
    double *xs = malloc(rows * depth * 8), *ws = malloc(outputs * depth * 8);
    fill(x, xs, rows * depth, dtype);
    fill(w, ws, outputs * depth, dtype);
    memset(blocks, 7, bytes + 2 * GUARD);
    blocks += GUARD;
    float counts[300];
    const int64_t counted = between(0, 1);
    for (int64_t k = 0; k < depth; k++) counts[k] = counted ? 0.25f * (float)between(0, 20) : 1;
    weight_packing packing = {w, outputs, depth, depth, dtype, blocks, NULL, NULL, NULL, counts};
    run_alone(path.int4_step(&packing));
    for (int64_t i = 1; i <= GUARD; i++)
        if (blocks[-i] != 7 || blocks[bytes + i - 1] != 7)
            failures++, printf("%s: packed beside the blocks\n", path.name);
    linear_problem problem = {x, blocks, NULL, y, rows, depth, outputs, depth, groups * INT4_ROW_BYTES, outputs,
                              dtype, SKINNY_INT4, NULL, 0};
    run_linears(&problem, 1, &path, 1);
    for (int64_t begin = 0; begin < depth; begin += INT4_GROUP) {
        const int64_t end = skinny_min(begin + INT4_GROUP, depth);
        for (int64_t r = 0; r < rows; r++) {
            float most = 0;
            for (int64_t k = begin; k < end; k++) most = fmaxf(most, fabsf((float)xs[r * depth + k]));
            for (int64_t k = begin; k < end; k++) xs[r * depth + k] = rounded(xs[r * depth + k], most / 127);
        }
        for (int64_t o = 0; o < outputs; o++) {
            double most = 0, left_out = 0, plainly = 0, square = 0;
            for (int64_t k = begin; k < end; k++) most = fmax(most, fabs(ws[o * depth + k]));
            const float scale = skinny_float_of_f16(skinny_f16_of((float)most / 64));
            for (int64_t k = begin; k < end; k++) {
                double *weight = ws + o * depth + k;
                const double plain = nearest(*weight, scale), own = read_int4(blocks, groups, o, k);
                plainly += counts[k] * (*weight - plain) * (*weight - plain);
                left_out += counts[k] * (*weight - own) * (*weight - own);
                square += counts[k] * *weight * *weight;
                *weight = own;
            }
            if (!(left_out <= plainly * 1.0001 + square * 1e-6)) failures++, printf("%s: a group's rounding\n", path.name);
        }
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t o = 0; o < outputs; o++) {
            double sum = 0, size = 0;
            for (int64_t k = 0; k < depth; k++) {
                const double product = xs[r * depth + k] * ws[o * depth + k];
                sum += product, size += fabs(product);
            }
            compare(path.name, dtype, read_one(y, r * outputs + o, dtype), sum, size);
        }
    free(x), free(w), free(y), free(blocks - GUARD), free(xs), free(ws);
}

int main(void) {
    kernel_path paths[MAX_PATHS];
    const int count = kernel_paths(paths);
    for (int i = 0; i < count; i++)
        for (int turn = 0; turn < 60; turn++) {
            check(paths[i], turn % 3), check_int8(paths[i], turn % 3);
            check_rounded(paths[i], turn % 3), check_int4(paths[i], turn % 3);
        }
    printf("linear, last of %d paths: %s, %d failures\n", count, paths[count - 1].name, failures);
    return failures != 0;
}
