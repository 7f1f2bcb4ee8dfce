#include "program.h"

/* Attention of rows of a batch that have different lengths: each head of each by one thread. */
typedef struct {
    const kernel_path *path;
    const attention_problem *problems;
    char *memory;
    int64_t bytes; /* one thread's */
} attention_rows;

typedef union {
    attention_pass pass;
    attention_rows rows;
} attention_work;

/* How much of what a program needs; operators use the same `scratch` in turn. */
typedef struct {
    int64_t steps, heads, scratch;
} program_needs;

static char *aligned(char *memory) { return memory + (CACHE_LINE - (uintptr_t)memory % CACHE_LINE); }

static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* Plans for another number of threads. Returns 0, or -1 when memory ran out. */
static int plan_program(program *p, const kernel_path *path, int threads) {
    if (!p->linears) p->linears = malloc(p->count * sizeof(linear_pass));
    if (!p->linears) return -1;
    linear_pass *pass = p->linears;
    for (const operation *o = p->operations; o < p->operations + p->count; o++)
        if (o->kind == OPERATION_LINEARS)
            path_of_linears(path, o->problem)->plan_linears(pass++, o->problem, o->count, threads);
    p->threads = threads;
    return 0;
}

/* Whether heads of rows keep the threads busy, so that none needs several. */
static int are_many(const operation *o, int threads) {
    return o->count > 1 && o->count * ((const attention_problem *)o->problem)->groups >= threads;
}

static void attend_head(void *of, int64_t chunk, int thread) {
    const attention_rows *rows = of;
    const int64_t groups = rows->problems->groups;
    work_step steps[ATTENTION_STEPS];
    attention_pass pass;
    rows->path->plan_attention(&pass, rows->problems + chunk / groups, 1);
    pass.first = chunk % groups, pass.count = 1;
    rows->path->add_attention(steps, &pass, rows->memory + thread * rows->bytes, 1);
    steps->work(steps->of, 0, thread);
}

/* What each thread needs for one problem after another. */
static int64_t bytes_of_rows(const operation *o, const kernel_path *path) {
    attention_pass pass;
    int64_t bytes = 0;
    for (int i = 0; i < o->count; i++)
        bytes = most(bytes, path->plan_attention(&pass, (const attention_problem *)o->problem + i, 1));
    return skinny_parts(bytes, CACHE_LINE) * CACHE_LINE;
}

/* Attention is planned anew each time: it depends on its slots. */
static program_needs needs_of(const program *p, const kernel_path *path, int threads) {
    program_needs needs = {0};
    const linear_pass *linears = p->linears;
    for (const operation *o = p->operations; o < p->operations + p->count; o++) {
        if (o->kind == OPERATION_LINEARS) {
            needs.scratch = most(needs.scratch, linears++->bytes);
            needs.steps += LINEAR_STEPS;
        } else if (o->kind == OPERATION_ATTENTION && are_many(o, threads)) {
            needs.scratch = most(needs.scratch, threads * bytes_of_rows(o, path_of_attention(path, o->problem)));
            needs.steps++, needs.heads++;
        } else if (o->kind == OPERATION_ATTENTION) {
            for (int i = 0; i < o->count; i++) {
                attention_pass heads;
                const attention_problem *row = (const attention_problem *)o->problem + i;
                const int64_t bytes = path_of_attention(path, row)->plan_attention(&heads, row, threads);
                needs.scratch = most(needs.scratch, bytes);
                do needs.steps += ATTENTION_STEPS, needs.heads++;
                while (attention_next(&heads));
            }
        } else {
            needs.steps++;
        }
    }
    return needs;
}

/* Memory for what is needed, from a cache line on; NULL: there is none. Zeros at first, since the last outputs
 * of a linear layer may fill less than the vector that is read of them. */
static char *program_memory(program *p, program_needs needs) {
    const int64_t all = needs.steps * (int64_t)(sizeof(work_step) + sizeof(work_progress)) +
                        needs.heads * (int64_t)sizeof(attention_work) + needs.scratch + 2 * CACHE_LINE;
    if (all > p->bytes) {
        char *memory = calloc(1, all);
        if (!memory) return NULL;
        free(p->memory);
        p->memory = memory, p->bytes = all;
    }
    return aligned(p->memory);
}

int run_program(program *p, const kernel_path *path, int threads) {
    if (p->threads != threads && plan_program(p, path, threads)) return -1;
    const program_needs needs = needs_of(p, path, threads);
    work_progress *progress = (work_progress *)program_memory(p, needs);
    if (!progress) return -1;
    work_step *steps = (work_step *)(progress + needs.steps), *next = steps;
    attention_work *work = (attention_work *)(steps + needs.steps);
    linear_pass *linears = p->linears;
    char *scratch = aligned((char *)(work + needs.heads));
    for (const operation *o = p->operations; o < p->operations + p->count; o++) {
        if (o->kind == OPERATION_LINEARS) {
            path_of_linears(path, o->problem)->add_linears(next, linears++, scratch, threads);
            next += LINEAR_STEPS;
        } else if (o->kind == OPERATION_ATTENTION && are_many(o, threads)) {
            const attention_problem *rows = o->problem;
            const kernel_path *own = path_of_attention(path, rows);
            work->rows = (attention_rows){own, rows, scratch, bytes_of_rows(o, own)};
            *next++ = (work_step){.work = attend_head, .of = &work->rows, .chunks = o->count * rows->groups};
            work++;
        } else if (o->kind == OPERATION_ATTENTION) {
            const kernel_path *own = path_of_attention(path, o->problem);
            for (int i = 0; i < o->count; i++) {
                attention_pass heads;
                own->plan_attention(&heads, (const attention_problem *)o->problem + i, threads);
                do {
                    attention_pass *pass = &work++->pass;
                    *pass = heads;
                    own->add_attention(next, pass, scratch, attention_threads(pass, threads, AWAKE_PRODUCTS));
                    next += ATTENTION_STEPS;
                } while (attention_next(&heads));
            }
        } else {
            *next++ = o->kind == OPERATION_NORM ? path->norm_step(o->problem) : path->element_step(o->problem);
        }
    }
    run_steps(steps, progress, (int)needs.steps, threads);
    return 0;
}

void free_program(program *p) {
    free(p->linears);
    free(p->memory);
}

/* Takes PASS_ROWS rows at most. */
static int run_pass(const linear_problem *p, int count, const kernel_path *path, int threads) {
    work_step steps[LINEAR_STEPS];
    work_progress progress[LINEAR_STEPS];
    linear_pass pass;
    const kernel_path *own = path_of_linears(path, p);
    char *memory = calloc(1, own->plan_linears(&pass, p, count, threads) + CACHE_LINE);
    if (!memory) return -1;
    own->add_linears(steps, &pass, aligned(memory), threads);
    run_steps(steps, progress, LINEAR_STEPS, threads);
    free(memory);
    return 0;
}

int run_linears(const linear_problem *problems, int count, const kernel_path *path, int threads) {
    linear_problem parts[MAX_TOGETHER];
    const int64_t rows = problems->rows, bytes = skinny_item_bytes(problems->dtype);
    const int useful = linear_threads(problems, count, threads);
    int failed = 0;
    for (int64_t row = 0; row < rows && !failed; row += PASS_ROWS) {
        for (int i = 0; i < count; i++) {
            parts[i] = problems[i];
            parts[i].x += row * parts[i].x_stride * bytes;
            parts[i].y += row * parts[i].y_stride * bytes;
            parts[i].rows = skinny_min(PASS_ROWS, rows - row);
        }
        failed = run_pass(parts, count, path, useful);
    }
    return failed;
}

int run_attention(const attention_problem *p, const kernel_path *path, int threads) {
    work_step steps[ATTENTION_STEPS];
    work_progress progress[ATTENTION_STEPS];
    attention_pass pass;
    const kernel_path *own = path_of_attention(path, p);
    char *memory = malloc(own->plan_attention(&pass, p, threads) + CACHE_LINE);
    if (!memory) return -1;
    do {
        const int useful = attention_threads(&pass, threads, THREAD_PRODUCTS);
        own->add_attention(steps, &pass, aligned(memory), useful);
        run_steps(steps, progress, ATTENTION_STEPS, useful);
    } while (attention_next(&pass));
    free(memory);
    return 0;
}
