/* A sequence of named steps: which one runs, which one to fail, how long each took. */
#ifndef DSEC_STEPS_H
#define DSEC_STEPS_H

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define STEPS_MAX 48

struct steps {
    const char *current;
    const char *fail;  /* fault injection: this step fails without being done; "" for none */
    bool trace;
    uint32_t count;
    uint64_t entered; /* ns */
    struct {
        const char *name;
        uint64_t ns;
    } times[STEPS_MAX];
};

static inline uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Close the time of the running step and name the next ("" at the end). */
static inline int enter_step(struct steps *steps, const char *name)
{
    if (steps->trace) {
        uint64_t now = now_ns();
        if (steps->current && steps->count < STEPS_MAX) {
            steps->times[steps->count].name = steps->current;
            steps->times[steps->count++].ns = now - steps->entered;
        }
        steps->entered = now;
    }
    steps->current = name;
    return *steps->fail && strcmp(steps->fail, name) == 0 ? -ECANCELED : 0;
}

/* The value of `call` as step `name`; return from the caller with its error. */
#define STEP(steps, name, call)                      \
    do {                                             \
        int step_error_ = enter_step((steps), name); \
        if (step_error_ == 0)                        \
            step_error_ = (call);                    \
        if (step_error_ < 0)                         \
            return step_error_;                      \
    } while (0)

#endif
