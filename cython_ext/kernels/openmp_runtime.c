/* The runtime's entry points are looked up in the running process and called as a compiler's `#pragma omp
 * parallel` would. Linking an OpenMP of our own could bring a second runtime into the process, and a
 * private thread pool is one: its threads compete with PyTorch's spinning ones for the same cores.
 * (Measured on two cores, 2.6 MB layers alternating with a parallel PyTorch operator: twice the time
 * with a private pool.) It also keeps the build free of OpenMP. Where no runtime is found, the
 * caller does the work alone.
 */
#include "openmp_runtime.h"

#include <stddef.h>

/* GNU's interface, which LLVM's and Intel's runtimes offer too on Linux. */
typedef void (*gomp_parallel_fn)(openmp_work, void *, unsigned, unsigned);
static gomp_parallel_fn gomp_parallel = NULL;

/* LLVM's and Intel's own interface (macOS, Windows). */
typedef struct {
    int32_t reserved_1, flags, reserved_2, reserved_3;
    const char *location;
} kmp_ident;
typedef void (*kmp_microtask)(int32_t *, int32_t *, openmp_work, void *);
typedef void (*kmp_fork_fn)(kmp_ident *, int32_t, kmp_microtask, ...);
typedef int32_t (*kmp_thread_fn)(kmp_ident *);
typedef void (*kmp_push_fn)(kmp_ident *, int32_t, int32_t);
static kmp_fork_fn kmp_fork = NULL;
static kmp_thread_fn kmp_thread = NULL;
static kmp_push_fn kmp_push = NULL;

void openmp_use(const uintptr_t *addresses, int count) {
    if (count == 1) gomp_parallel = (gomp_parallel_fn)addresses[0];
    if (count != 3) return;
    kmp_fork = (kmp_fork_fn)addresses[0];
    kmp_thread = (kmp_thread_fn)addresses[1];
    kmp_push = (kmp_push_fn)addresses[2];
}

static void openmp_microtask(int32_t *thread, int32_t *bound, openmp_work work, void *shared) {
    (void)thread, (void)bound;
    work(shared);
}

void openmp_parallel(openmp_work work, void *shared, int threads) {
    static kmp_ident ident = {0, 2, 0, 0, ";unknown;unknown;0;0;;"};
    if (threads > 1 && gomp_parallel) {
        gomp_parallel(work, shared, (unsigned)threads, 0);
    } else if (threads > 1 && kmp_fork) {
        kmp_push(&ident, kmp_thread(&ident), threads);
        kmp_fork(&ident, 2, (kmp_microtask)openmp_microtask, work, shared);
    } else {
        work(shared);
    }
}
