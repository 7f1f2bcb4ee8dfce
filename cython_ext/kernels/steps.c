#include "steps.h"

#include "paths.h"

#if defined(X86_PATHS) || defined(ARM_PATHS)
#include <sched.h>

#ifdef X86_PATHS
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() __asm__ volatile("yield")
#endif

/* Looks at whether the step before is done, of which the first may fetch; about 0.1 ms, after which the
 * core may be somebody else's. */
#define MOST_FETCHES 2048
#define MOST_PAUSES 4096

typedef struct {
    const work_step *steps;
    work_progress *progress;
    int count;
    int64_t next_thread;
} steps_run;

/* Where the step behind those that are one thread's begins. */
static int steps_end(const steps_run *run, int first) {
    int end = first + 1;
    if (run->steps[first].chunks > 1) return end;
    while (end < run->count && run->steps[end].chunks <= 1) end++;
    return end;
}

static int64_t chunks_of(const work_step *step) { return step->chunks > 1 ? step->chunks : 1; }

static void wait_for(const steps_run *run, int before, const work_step *step, int64_t chunk) {
    const int64_t *done = &run->progress[before].done, chunks = chunks_of(run->steps + before);
    for (int64_t turn = 0; LOAD_ACQUIRE(done) < chunks; turn++) {
        if (step->fetch && turn < MOST_FETCHES)
            step->fetch(step->of, chunk, turn);
        else if (turn < MOST_PAUSES)
            PAUSE();
        else
            sched_yield();
    }
}

static void run_thread(void *shared) {
    steps_run *run = shared;
    const int thread = (int)FETCH_ADD(&run->next_thread);
    for (int first = 0, before = -1, end; first < run->count; before = first, first = end) {
        const work_step *step = run->steps + first;
        work_progress *progress = run->progress + first;
        int64_t chunk;
        end = steps_end(run, first);
        while ((chunk = FETCH_ADD(&progress->next)) < chunks_of(step)) {
            if (before >= 0) wait_for(run, before, step, chunk);
            for (int i = first; i < end; i++)
                if (run->steps[i].chunks) run->steps[i].work(run->steps[i].of, chunk, thread);
            ADD_RELEASE(&progress->done);
        }
    }
}

void run_steps(const work_step *steps, work_progress *progress, int count, int threads) {
    steps_run run = {.steps = steps, .progress = progress, .count = count};
    memset(progress, 0, count * sizeof(work_progress));
    openmp_parallel(run_thread, &run, threads);
}
#endif
