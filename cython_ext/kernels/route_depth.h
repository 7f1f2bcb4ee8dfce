/* How many reroute scopes the running thread is inside. */
#ifndef ROUTE_DEPTH_H
#define ROUTE_DEPTH_H

#if defined(_MSC_VER)
static __declspec(thread) int thread_depth = 0;
#else
static __thread int thread_depth = 0;
#endif

#endif
