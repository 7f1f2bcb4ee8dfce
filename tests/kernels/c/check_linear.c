/* Every instruction set's linear layer against sums in double, over random shapes. */
#include "common.h"
#include "paths.h"

static void check(kernel_path path, int dtype) {
    const int64_t rows = between(1, 70), depth = between(1, 200), outputs = between(1, 140);
    char *x = malloc(rows * depth * 4), *w = malloc(outputs * depth * 4);
    char *bias = malloc(outputs * 4), *y = malloc(rows * outputs * 4);
    double *xs = malloc(rows * depth * 8), *ws = malloc(outputs * depth * 8);
    double *biases = malloc(outputs * 8);
    fill(x, xs, rows * depth, dtype);
    fill(w, ws, outputs * depth, dtype);
    fill(bias, biases, outputs, dtype);
    linear_problem problem = {x, w, bias, y, rows, depth, outputs, depth, depth, outputs, dtype};
    path.linear(&problem, 1);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t o = 0; o < outputs; o++) {
            double sum = biases[o], size = fabs(sum);
            for (int64_t k = 0; k < depth; k++) {
                const double product = xs[r * depth + k] * ws[o * depth + k];
                sum += product, size += fabs(product);
            }
            compare(path.name, dtype, read_one(y, r * outputs + o, dtype), sum, size);
        }
    free(x), free(w), free(bias), free(y), free(xs), free(ws), free(biases);
}

int main(void) {
    kernel_path paths[MAX_PATHS];
    const int count = kernel_paths(paths);
    for (int i = 0; i < count; i++)
        for (int turn = 0; turn < 60; turn++) check(paths[i], turn % 3);
    printf("linear, last of %d paths: %s, %d failures\n", count, paths[count - 1].name, failures);
    return failures != 0;
}
