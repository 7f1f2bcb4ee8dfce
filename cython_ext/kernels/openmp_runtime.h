/* Parallel regions on the OpenMP runtime that PyTorch has already loaded; see openmp_runtime.c. */
#ifndef OPENMP_RUNTIME_H
#define OPENMP_RUNTIME_H

#include <stdint.h>

typedef void (*openmp_work)(void *);

/* One address is GNU's entry point; three are LLVM's fork, thread number and thread count. */
void openmp_use(const uintptr_t *addresses, int count);

/* Runs work(shared) on at most `threads` threads, the caller's among them. */
void openmp_parallel(openmp_work work, void *shared, int threads);

#endif
