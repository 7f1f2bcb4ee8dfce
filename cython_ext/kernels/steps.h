/* Work in steps, in one parallel region: a step begins when all chunks of the one before it are done.
 *
 * Not when all threads have arrived: one that is not running, and holds no chunk, stops nobody. A
 * thread that finds no chunk left goes on to the next step, takes a chunk of it, and fetches what that
 * reads while it waits.
 */
#ifndef STEPS_H
#define STEPS_H

#include <stdint.h>

typedef struct {
    void (*work)(void *of, int64_t chunk, int thread);
    /* The turn-th part of what a chunk reads first, into the caches; NULL: there is nothing to fetch. */
    void (*fetch)(void *of, int64_t chunk, int64_t turn);
    void *of;
    int64_t chunks; /* 0: there is nothing to do */
} work_step;

static inline void run_alone(work_step step) {
    for (int64_t chunk = 0; chunk < step.chunks; chunk++) step.work(step.of, chunk, 0);
}

/* How far a step has got, apart from others in the caches. */
typedef struct {
    int64_t next, apart[7];
    int64_t done, also_apart[7];
} work_progress;

/* Steps one after another; neighbours of one chunk each are one thread's, without a wait between them.
 * `progress` has as many elements as there are steps. Threads are numbered from 0. */
void run_steps(const work_step *steps, work_progress *progress, int count, int threads);

#endif
