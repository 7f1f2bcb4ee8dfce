/* Programs of every instruction set on several threads, to the bit, against their operators one by one on one.
 * Threads are made for each region, so that a sanitizer sees when they begin and end. */
#include <pthread.h>

#include "common.h"
#include "program.h"

#define MOST_THREADS 5
#define LAYERS 4

static void *run_one(void *task) {
    void **both = task;
    ((openmp_work)both[0])(both[1]);
    return NULL;
}

static void parallel(openmp_work work, void *shared, unsigned threads, unsigned flags) {
    pthread_t others[MOST_THREADS];
    void *task[2] = {(void *)work, shared};
    (void)flags;
    for (unsigned i = 1; i < threads; i++) pthread_create(others + i, NULL, run_one, task);
    work(shared);
    for (unsigned i = 1; i < threads; i++) pthread_join(others[i], NULL);
}

/* Layers of linear, table, norm and attention over what the one before has given; heads are as wide as 16. */
typedef struct {
    linear_problem linears[LAYERS][2];
    element_problem lookups[LAYERS];
    norm_problem norms[LAYERS];
    attention_problem attends[LAYERS], parts[LAYERS][2];
    operation operations[4 * LAYERS];
    char *x, *projected, *looked_up, *normed;
} network;

static char *random_bytes(int64_t count, int dtype) {
    char *to = malloc(count * 4);
    double *values = malloc(count * 8);
    fill(to, values, count, dtype);
    free(values);
    return to;
}

static void build(network *n, int dtype, int64_t rows, int64_t depth, char **weights, char *keys, int64_t slots,
                  char *table) {
    const int64_t heads = depth / 16, bytes = skinny_item_bytes(dtype);
    for (int i = 0; i < LAYERS; i++) {
        for (int j = 0; j < 2; j++)
            n->linears[i][j] = (linear_problem){n->x, weights[i] + j * depth * depth * bytes, NULL,
                                                n->projected + j * depth * bytes, rows, depth, depth, depth,
                                                depth, 2 * depth, dtype, dtype, NULL, 0};
        n->lookups[i] = (element_problem){n->projected, dtype == SKINNY_FLOAT32 ? n->projected : table, n->looked_up,
                                          {1, 1, rows, depth}, {{0, 0, 2 * depth, 1}, {0}, {0, 0, depth, 1}}, dtype,
                                          dtype == SKINNY_FLOAT32 ? ELEMENT_COPY : ELEMENT_TABLE, NULL, 0};
        n->norms[i] = (norm_problem){n->looked_up, keys, n->normed, rows, depth, 1e-5f, dtype, 16, 0, 1};
        n->attends[i] = (attention_problem){n->normed, keys, keys, NULL, n->x, 1, heads, 1, rows, slots, 16, 16,
                                            {0, 16, depth}, {0, 16, depth}, {0, 16, depth}, {0}, 0.25f, dtype,
                                            MASK_NONE};
        n->operations[4 * i] = (operation){OPERATION_LINEARS, 2, n->linears[i]};
        n->operations[4 * i + 1] = (operation){OPERATION_ELEMENTS, 1, n->lookups + i};
        n->operations[4 * i + 2] = (operation){OPERATION_NORM, 1, n->norms + i};
        /* Queries apart from one another, as those of rows of a batch are. */
        const int64_t first = between(0, rows - 1);
        for (int j = 0; j < 2; j++) {
            n->parts[i][j] = n->attends[i];
            n->parts[i][j].query += j * first * depth * bytes;
            n->parts[i][j].out += j * first * depth * bytes;
            n->parts[i][j].queries = j ? rows - first : first;
        }
        n->operations[4 * i + 3] = (operation){OPERATION_ATTENTION, first ? 2 : 1, n->parts[i] + !first};
    }
}

static void run_one_by_one(network *n, const kernel_path *path) {
    for (int i = 0; i < LAYERS; i++) {
        run_linears(n->linears[i], 2, path, 1);
        run_alone(path->element_step(n->lookups + i));
        run_alone(path->norm_step(n->norms + i));
        run_attention(n->attends + i, path, 1);
    }
}

static void check(const kernel_path *path, int dtype) {
    const int64_t rows = between(1, 40), depth = 16 * between(1, 24), slots = between(1, 700);
    const int64_t bytes = rows * depth * skinny_item_bytes(dtype);
    network n = {.x = malloc(bytes), .projected = malloc(2 * bytes), .looked_up = malloc(bytes), .normed = malloc(bytes)};
    char *x = random_bytes(rows * depth, dtype), *expected = malloc(bytes), *weights[LAYERS];
    char *keys = random_bytes(slots * depth, dtype), *table = random_bytes(1 << 16, dtype);
    for (int i = 0; i < LAYERS; i++) weights[i] = random_bytes(2 * depth * depth, dtype);
    build(&n, dtype, rows, depth, weights, keys, slots, table);
    memcpy(n.x, x, bytes);
    run_one_by_one(&n, path);
    memcpy(expected, n.x, bytes);
    program p = {.operations = n.operations, .count = 4 * LAYERS};
    for (int turn = 0; turn < 4; turn++) {
        memcpy(n.x, x, bytes);
        if (run_program(&p, path, (int)between(1, MOST_THREADS))) failures++;
        if (memcmp(n.x, expected, bytes) && failures++ < 5) printf("%s, dtype %d: other bits\n", path->name, dtype);
    }
    free_program(&p);
    for (int i = 0; i < LAYERS; i++) free(weights[i]);
    free(n.x), free(n.projected), free(n.looked_up), free(n.normed), free(x), free(expected), free(keys), free(table);
}

int main(void) {
    kernel_path paths[MAX_PATHS];
    const int count = kernel_paths(paths);
    const uintptr_t address = (uintptr_t)parallel;
    openmp_use(&address, 1);
    for (int i = 0; i < count; i++)
        for (int turn = 0; turn < 12; turn++) check(paths + i, turn % 3);
    printf("programs, last of %d paths: %s, %d failures\n", count, paths[count - 1].name, failures);
    return failures != 0;
}
