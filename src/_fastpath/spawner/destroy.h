/* The end of a container: kill, wait without blocking the spawner, remove. Every part may be repeated, so
 * that recovery after a crash at any point is the same call again. */
#ifndef DSEC_SPAWNER_DESTROY_H
#define DSEC_SPAWNER_DESTROY_H

#include <stdint.h>

#include "spawner/host.h"
#include "spawner/plan.h"

#define DESTROYS_MAX 64 /* running at once in one spawner */
#define RETRY_MS 1

struct destruction {
    bool running;
    uint64_t request;     /* id to answer */
    uint64_t deadline_ns;
    int pidfd;            /* -1: the process is not known (any more) */
    int netns;            /* -1: nobody asked about it */
    int looks;            /* at the network namespace */
    bool clean;
    const char *step;
    struct arena arena;   /* holds the strings of the plan */
    struct destroy_plan plan;
};

/* Kill everything in the sandbox's cgroup, or its PID 1 where there is no cgroup. */
int begin_destroy(struct destruction *d, const struct host *host);
/* Go on: -EAGAIN while a process is left (call again when the pidfd is readable or after RETRY_MS),
 * -ETIMEDOUT past the deadline, 0 when nothing is left, or another error. */
int finish_destroy(struct destruction *d, const struct host *host);

#endif
