/* burst: a job of a little work at fixed times, and what takes the CPUs from it.
 *
 *   burst calibrate            prints how many steps are 20 ms of work
 *   burst job STEPS COUNT      does the work every 100 ms, COUNT times; prints for each the
 *                              microseconds from when it was due until it was done
 *   burst hog [idle]           never stops; with `idle` under SCHED_IDLE
 */
#include <errno.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { WORK_NS = 20000000, PERIOD_NS = 100000000, TRIALS = 50, TRIAL_STEPS = 1000000 };

static const int64_t SECOND = 1000000000;
static volatile uint64_t sink;

static void work(uint64_t steps)
{
    for (uint64_t i = 0; i < steps; i++)
        sink += i;
}

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * SECOND + t.tv_nsec;
}

/* The quickest trial is the one that nobody disturbed. */
static int calibrate(void)
{
    int64_t best = INT64_MAX;
    for (int i = 0; i < TRIALS; i++) {
        int64_t begin = now_ns();
        work(TRIAL_STEPS);
        int64_t took = now_ns() - begin;
        if (took < best)
            best = took;
    }
    printf("%lld\n", (long long)(TRIAL_STEPS * (double)WORK_NS / (double)best));
    return 0;
}

static int job(uint64_t steps, int count)
{
    int64_t due = now_ns();
    for (int i = 0; i < count; i++) {
        due += PERIOD_NS;
        if (due < now_ns())
            due = now_ns(); /* late from the last one, which was charged for it */
        struct timespec at = { .tv_sec = due / SECOND, .tv_nsec = due % SECOND };
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL);
        work(steps);
        printf("%lld\n", (long long)(now_ns() - due) / 1000);
    }
    return 0;
}

static int hog(int idle)
{
    struct sched_param none = { 0 };
    if (idle && sched_setscheduler(0, SCHED_IDLE, &none) < 0) {
        fprintf(stderr, "burst: SCHED_IDLE: %s\n", strerror(errno));
        return 1;
    }
    for (;;)
        work(TRIAL_STEPS);
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "";
    if (strcmp(what, "calibrate") == 0)
        return calibrate();
    if (strcmp(what, "job") == 0 && argc == 4)
        return job(strtoull(argv[2], NULL, 10), atoi(argv[3]));
    if (strcmp(what, "hog") == 0)
        return hog(argc > 2);
    fprintf(stderr, "burst: see the top of burst.c\n");
    return 2;
}
