/* burst: a job of a little work at fixed times, and what takes the CPUs from it.
 *
 *   burst calibrate            prints how many steps are 20 ms of work
 *   burst job STEPS COUNT      does the work every 100 ms, COUNT times; prints for each the
 *                              microseconds from when it was due until it was done
 *   burst hog SHARE [idle]     takes so many thousandths of a CPU, at 1000 never stops; with
 *                              `idle` under SCHED_IDLE
 */
#include <errno.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { WORK_NS = 20000000, PERIOD_NS = 100000000, TRIALS = 50, TRIAL_STEPS = 1000000 };
enum { HOG_NS = 20000000, HOG_STEPS = 20000, ALL = 1000 };

static const int64_t SECOND = 1000000000;
static volatile uint64_t sink;

static void work(uint64_t steps)
{
    for (uint64_t i = 0; i < steps; i++)
        sink += i;
}

static int64_t clock_ns(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec * SECOND + t.tv_nsec;
}

static int64_t now_ns(void)
{
    return clock_ns(CLOCK_MONOTONIC);
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

/* Works for its share of 20 to 40 ms, then sleeps for the rest; the length is drawn anew each time,
 * so that it does not fall into step with the job. CPU time counts, so a hog that had to wait does
 * all of its work later. */
static int hog(int share, int idle)
{
    struct sched_param none = { 0 };
    if (idle && sched_setscheduler(0, SCHED_IDLE, &none) < 0) {
        fprintf(stderr, "burst: SCHED_IDLE: %s\n", strerror(errno));
        return 1;
    }
    srandom((unsigned)now_ns()); /* all of them may have the same pid */
    for (;;) {
        int64_t period = HOG_NS + random() % HOG_NS, busy = period * share / ALL;
        int64_t until = clock_ns(CLOCK_THREAD_CPUTIME_ID) + busy;
        while (clock_ns(CLOCK_THREAD_CPUTIME_ID) < until)
            work(HOG_STEPS);
        struct timespec rest = { .tv_nsec = period - busy };
        if (share < ALL)
            clock_nanosleep(CLOCK_MONOTONIC, 0, &rest, NULL);
    }
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "";
    if (strcmp(what, "calibrate") == 0)
        return calibrate();
    if (strcmp(what, "job") == 0 && argc == 4)
        return job(strtoull(argv[2], NULL, 10), atoi(argv[3]));
    int share = argc > 2 ? atoi(argv[2]) : 0;
    if (strcmp(what, "hog") == 0 && share > 0 && share <= ALL)
        return hog(share, argc > 3);
    fprintf(stderr, "burst: see the top of burst.c\n");
    return 2;
}
