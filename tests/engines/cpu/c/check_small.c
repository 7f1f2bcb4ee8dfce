/* Norms and operators of single elements of every instruction set, to the bit, against the same without one
 * and against single numbers. */
#include "common.h"
#include "paths.h"

static void expect_same(const char *what, const kernel_path *path, const void *got, const void *expected,
                        int64_t bytes) {
    if (memcmp(got, expected, bytes) && failures++ < 5) printf("%s, %s: other bits\n", path->name, what);
}

static void check_norm(const kernel_path *path, int dtype) {
    const int64_t rows = between(1, 4), depth = between(1, 300), bytes = skinny_item_bytes(dtype);
    const int lanes[] = {4, 8, 16};
    char *x = malloc(rows * depth * bytes), *w = malloc(depth * bytes);
    char *got = malloc(rows * depth * bytes), *expected = malloc(rows * depth * bytes);
    double *values = malloc(rows * depth * 8);
    fill(x, values, rows * depth, dtype);
    fill(w, values, depth, dtype);
    norm_problem problem = {x, w, got, rows, depth, 1e-5f, dtype, lanes[between(0, 2)], (int)between(0, 1),
                            (int)between(0, 1)};
    run_alone(path->norm_step(&problem));
    problem.y = expected;
    plain_norm(&problem);
    expect_same("norm", path, got, expected, rows * depth * bytes);
    free(x), free(w), free(got), free(expected), free(values);
}

static void write_one(char *to, float value, int dtype) {
    const uint16_t half = dtype == SKINNY_BFLOAT16 ? skinny_bf16_of(value) : skinny_f16_of(value);
    memcpy(to, dtype == SKINNY_FLOAT32 ? (const void *)&value : (const void *)&half, skinny_item_bytes(dtype));
}

/* The second operand is shown to all rows, and rows of the result lie apart. */
static void check_elements(const kernel_path *path, int dtype, int kind) {
    const int64_t rows = between(1, 5), count = between(1, 70), apart = count + between(0, 3);
    const int64_t bytes = skinny_item_bytes(dtype);
    char *a = malloc(rows * count * bytes), *b = malloc(count * bytes), *got = calloc(rows * apart, bytes);
    char *expected = calloc(rows * apart, bytes);
    double *as = malloc(rows * count * 8), *bs = malloc(count * 8);
    int64_t places[10];
    fill(a, as, rows * count, dtype);
    fill(b, bs, count, dtype);
    element_problem problem = {a, b, got, {1, rows, 1, count},
                                     {{0, count, 0, 1}, {0, 0, 0, 1}, {0, apart, 0, 1}}, dtype, kind, NULL, 0};
    if (between(0, 1)) {
        /* The same rows on the third axis, in places that are told: each is its own in turn. */
        problem.shape[1] = 1, problem.shape[2] = rows, problem.placed = 2 * (int)between(0, 1);
        problem.strides[0][0] = count, problem.strides[0][2] = count;
        problem.strides[2][0] = apart, problem.strides[2][2] = apart, problem.places = places;
        for (int64_t i = 0; i < rows; i++) places[2 * i] = i / 2, places[2 * i + 1] = i - i / 2;
    }
    run_alone(path->element_step(&problem));
    for (int64_t i = 0; i < rows * count; i++) {
        const float x = (float)as[i], y = (float)bs[i % count];
        const float value = kind == ELEMENT_MUL ? x * y : kind == ELEMENT_ADD ? x + y : kind == ELEMENT_NEG ? -x : x;
        write_one(expected + (i / count * apart + i % count) * bytes, value, dtype);
    }
    expect_same("elements", path, got, expected, rows * apart * bytes);
    free(a), free(b), free(got), free(expected), free(as), free(bs);
}

int main(void) {
    kernel_path paths[MAX_PATHS];
    const int count = kernel_paths(paths);
    for (int i = 0; i < count; i++)
        for (int turn = 0; turn < 240; turn++) {
            check_norm(paths + i, turn % 3);
            check_elements(paths + i, turn % 3, turn / 3 % 4);
        }
    printf("small operators, last of %d paths: %s, %d failures\n", count, paths[count - 1].name, failures);
    return failures != 0;
}
