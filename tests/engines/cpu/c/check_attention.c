/* Every instruction set's attention against sums in double, over random shapes. */
#include "common.h"
#include "program.h"

static void check(kernel_path path, int dtype) {
    const int64_t groups = between(1, 3), heads = between(1, 4), queries = between(1, 20);
    const int64_t slots = between(1, 150), depth = between(1, 70), width = 16 * between(1, 9);
    const int64_t all = groups * heads;
    char *q = malloc(all * queries * depth * 4), *k = malloc(groups * slots * depth * 4);
    char *v = malloc(groups * slots * width * 4), *out = malloc(all * queries * width * 4);
    char *mask = malloc(queries * slots);
    double *qs = malloc(all * queries * depth * 8), *ks = malloc(groups * slots * depth * 8);
    double *vs = malloc(groups * slots * width * 8), *weights = malloc(slots * 8);
    fill(q, qs, all * queries * depth, dtype);
    fill(k, ks, groups * slots * depth, dtype);
    fill(v, vs, groups * slots * width, dtype);
    for (int64_t i = 0; i < queries * slots; i++) mask[i] = i % slots == 0 || uniform() > -0.5;
    attention_problem problem = {
        q, k, v, mask, out, 1, groups, heads, queries, slots, depth, width,
        {0, queries * depth, depth}, {0, slots * depth, depth}, {0, slots * width, width},
        {0, 0, slots}, 0.2f, dtype, MASK_BOOL};
    run_attention(&problem, &path, 1);
    for (int64_t row = 0; row < all * queries; row++) {
        const int64_t head = row / queries, query = row % queries, group = head / heads;
        double total = 0;
        for (int64_t s = 0; s < slots; s++) {
            double score = 0;
            for (int64_t d = 0; d < depth; d++)
                score += qs[row * depth + d] * ks[(group * slots + s) * depth + d];
            total += weights[s] = mask[query * slots + s] ? exp(score * (double)0.2f) : 0;
        }
        for (int64_t o = 0; o < width; o++) {
            double sum = 0, size = 0;
            for (int64_t s = 0; s < slots; s++) {
                const double part = weights[s] / total * vs[(group * slots + s) * width + o];
                sum += part, size += fabs(part);
            }
            compare(path.name, dtype, read_one(out, (query * all + head) * width + o, dtype), sum, size);
        }
    }
    free(q), free(k), free(v), free(out), free(mask), free(qs), free(ks), free(vs), free(weights);
}

int main(void) {
    kernel_path paths[MAX_PATHS];
    const int count = kernel_paths(paths);
    for (int i = 0; i < count; i++)
        for (int turn = 0; turn < 60; turn++) check(paths[i], turn % 3);
    printf("attention, last of %d paths: %s, %d failures\n", count, paths[count - 1].name, failures);
    return failures != 0;
}
