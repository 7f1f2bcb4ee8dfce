/* Every instruction set's linear layer against sums in double, over random shapes. */
#include "common.h"
#include "program.h"

#define GUARD 64 /* bytes on either side of an output, which nobody may write to */

static void check(kernel_path path, int dtype) {
    const int64_t rows = between(1, 70), depth = between(1, 200), outputs = between(1, 140);
    char *x = malloc(rows * depth * 4), *w = malloc(outputs * depth * 4);
    char *bias = malloc(outputs * 4), *y = malloc(rows * outputs * 4 + 2 * GUARD);
    double *xs = malloc(rows * depth * 8), *ws = malloc(outputs * depth * 8);
    double *biases = malloc(outputs * 8);
    fill(x, xs, rows * depth, dtype);
    fill(w, ws, outputs * depth, dtype);
    fill(bias, biases, outputs, dtype);
    memset(y, 7, rows * outputs * 4 + 2 * GUARD);
    y += GUARD;
    linear_problem problem = {x, w, bias, y, rows, depth, outputs, depth, depth, outputs, dtype, dtype,
                              NULL, 0, NULL};
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
    free(x), free(w), free(bias), free(y - GUARD), free(xs), free(ws), free(biases);
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
                              dtype, SKINNY_INT8, scales, dtype, NULL};
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
    float *scales = malloc(outputs * 4), *norms = malloc(outputs * 8), *peaks = malloc(rows * 4);
    fill(x, xs, rows * depth, dtype);
    fill(w, ws, outputs * depth, dtype);
    int8_packing packing = {w, outputs, depth, depth, dtype, values, scales, norms, norms + outputs, 0};
    path.pack_int8(&packing, 1);
    linear_problem problem = {x, (char *)values, NULL, y, rows, depth, outputs, depth, stride,
                              outputs, dtype, SKINNY_ROUNDED, (char *)scales, SKINNY_FLOAT32,
                              dtype == SKINNY_FLOAT32 ? peaks : NULL};
    run_linears(&problem, 1, &path, 1);
    for (int64_t r = 0; r < rows && problem.peaks; r++) {
        double most = -INFINITY;
        for (int64_t o = 0; o < outputs; o++) most = fmax(most, read_one(y, r * outputs + o, dtype));
        if (peaks[r] != most) failures++, printf("%s: the largest output of row %d\n", path.name, (int)r);
    }
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
    free(x), free(w), free(y), free(xs), free(ws), free(values), free(scales), free(norms), free(peaks);
}

int main(void) {
    kernel_path paths[MAX_PATHS];
    const int count = kernel_paths(paths);
    for (int i = 0; i < count; i++)
        for (int turn = 0; turn < 60; turn++)
            check(paths[i], turn % 3), check_int8(paths[i], turn % 3), check_rounded(paths[i], turn % 3);
    printf("linear, last of %d paths: %s, %d failures\n", count, paths[count - 1].name, failures);
    return failures != 0;
}
