#include "blobd/jobs.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "blobd/fuse.h"
#include "blobd/log.h"
#include "blobd/trace.h"

#define TICK_NS 20000000l

static struct {
    pthread_mutex_t lock;
    pthread_cond_t some;
    uint32_t waiting;
    bool started;
} clock_state = { .lock = PTHREAD_MUTEX_INITIALIZER, .some = PTHREAD_COND_INITIALIZER };

uint32_t jobs_waiting(void)
{
    pthread_mutex_lock(&clock_state.lock);
    uint32_t count = clock_state.waiting;
    pthread_mutex_unlock(&clock_state.lock);
    return count;
}

static void count_waiting(int change)
{
    pthread_mutex_lock(&clock_state.lock);
    clock_state.waiting += (uint32_t)change;
    if (clock_state.waiting)
        pthread_cond_signal(&clock_state.some);
    pthread_mutex_unlock(&clock_state.lock);
}

/* --- answers ------------------------------------------------------------------------------- */

static void drop(struct job *job)
{
    cache_unref(job->blob);
    free(job);
}

static void fail(struct job *job, int error)
{
    atomic_fetch_add(&counters.read_errors, 1);
    fuse_reply_error(job->unique, error);
    drop(job);
}

/* Why a job could not wait. */
static int reason(struct blob *blob)
{
    return atomic_load(&blob->removed) ? ESTALE : ENOMEM;
}

/* True: answered from the cache. */
static bool answer(const struct job *job)
{
    if (!blob_hold(job->blob, job->first, job->last))
        return false;
    fuse_reply_file(job->unique, job->blob->data, job->offset, job->size);
    blob_release(job->blob, job->first, job->last);
    return true;
}

/* Wait on the blob unless everything is there already. */
static void enter(struct job *job)
{
    struct blob *blob = job->blob;

    pthread_mutex_lock(&blob->lock);
    enum progress progress = job_advance(job);
    if (progress == JOB_WAITS) {
        job->next = blob->jobs;
        blob->jobs = job;
    }
    pthread_mutex_unlock(&blob->lock);
    if (progress == JOB_WAITS)
        return;
    count_waiting(-1);
    if (progress == JOB_FAILED)
        fail(job, reason(blob));
    else if (answer(job))
        drop(job);
    else { /* evicted in between */
        count_waiting(1);
        enter(job);
    }
}

static void answer_all(struct job *list)
{
    for (struct job *job = list, *next; job; job = next) {
        next = job->next;
        count_waiting(-1);
        if (answer(job)) {
            drop(job);
        } else {
            count_waiting(1);
            enter(job);
        }
    }
}

static void fail_all(struct job *list, int error)
{
    for (struct job *job = list, *next; job; job = next) {
        next = job->next;
        count_waiting(-1);
        fail(job, error);
    }
}

void serve_read(struct blob *blob, uint64_t unique, uint64_t offset, uint32_t size, uint32_t pid)
{
    uint32_t first = blob_find(blob, offset), last = blob_find(blob, offset + size - 1);

    atomic_fetch_add(&counters.reads, 1);
    if (atomic_load(&blob->traced))
        trace_note(blob, first, last);
    if (blob_hold(blob, first, last)) {
        atomic_fetch_add(&counters.hits, 1); /* before who asked can look */
        fuse_reply_file(unique, blob->data, offset, size);
        blob_release(blob, first, last);
        cache_unref(blob);
        return;
    }
    struct job *job = malloc(sizeof *job);
    if (!job) {
        fuse_reply_error(unique, ENOMEM);
        cache_unref(blob);
        return;
    }
    *job = (struct job){ .unique = unique, .offset = offset, .size = size, .first = first,
                         .last = last, .pid = pid, .blob = blob,
                         .deadline_ns = now_ns() + limits.demand_ns };
    atomic_fetch_add(&counters.waits, 1);
    count_waiting(1);
    enter(job);
}

/* --- what fetches report ------------------------------------------------------------------- */

static void move(struct job **at, struct job **list)
{
    struct job *job = *at;
    *at = job->next;
    job->next = *list;
    *list = job;
}

void jobs_wake(const struct fetch *fetch)
{
    struct blob *blob = fetch->blob;
    struct job *ready = NULL, *failed = NULL;

    pthread_mutex_lock(&blob->lock);
    for (struct job **at = &blob->jobs; *at;) {
        struct job *job = *at;
        bool concerned = job->first < fetch->end && fetch->first <= job->last;
        enum progress progress = concerned ? job_advance(job) : JOB_WAITS;
        if (progress == JOB_WAITS)
            at = &job->next;
        else
            move(at, progress == JOB_READY ? &ready : &failed);
    }
    pthread_mutex_unlock(&blob->lock);
    answer_all(ready);
    fail_all(failed, reason(blob));
}

static bool needs_owned(const struct job *job, const struct fetch *fetch)
{
    uint32_t from = job->first > fetch->first ? job->first : fetch->first;

    for (uint32_t i = from; i <= job->last && i < fetch->end; i++)
        if (fetch_owns(fetch, i))
            return true;
    return false;
}

void jobs_fail(struct fetch *fetch, uint64_t spared_ns)
{
    struct blob *blob = fetch->blob;
    struct job *failed = NULL;

    pthread_mutex_lock(&blob->lock);
    for (struct job **at = &blob->jobs; *at;) {
        if ((*at)->deadline_ns <= spared_ns && needs_owned(*at, fetch))
            move(at, &failed);
        else
            at = &(*at)->next;
    }
    for (uint32_t i = fetch->first; i < fetch->end; i++)
        if (fetch_owns(fetch, i))
            fetch_disown(fetch, i);
    pthread_mutex_unlock(&blob->lock);
    fail_all(failed, EIO);
    jobs_wake(fetch);
}

void jobs_end(struct blob *blob)
{
    pthread_mutex_lock(&blob->lock);
    struct job *list = blob->jobs;
    blob->jobs = NULL;
    pthread_mutex_unlock(&blob->lock);
    fail_all(list, ESTALE);
}

/* --- the clock and signals ------------------------------------------------------------------ */

/* Whether `pid` is being killed. Only that ends a read early: any other signal would turn into an
 * I/O error of a process that lives on. */
static bool is_dying(uint32_t pid)
{
    char path[64], text[4096];

    if (pid == 0)
        return false; /* it is in a PID namespace that is not ours */
    snprintf(path, sizeof path, "/proc/%u/status", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return errno == ENOENT;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    text[n > 0 ? n : 0] = 0;
    for (int i = 0; i < 2; i++) {
        const char *field = strstr(text, (const char *[]){ "\nSigPnd:", "\nShdPnd:" }[i]);
        if (field && strtoull(field + 8, NULL, 16) & 1u << 8) /* SIGKILL */
            return true;
    }
    return false;
}

bool interrupt_job(uint64_t unique)
{
    bool found = false;
    struct blob *blob;

    for (size_t n = 0; !found && (blob = cache_at(n)); n++) {
        pthread_mutex_lock(&blob->lock);
        for (struct job *job = blob->jobs; job && !found; job = job->next)
            if (job->unique == unique)
                found = job->interrupted = true;
        pthread_mutex_unlock(&blob->lock);
        cache_unref(blob);
    }
    return found; /* the clock looks whether it is a kill */
}

static void look_at(struct blob *blob, uint64_t now)
{
    struct job *late = NULL, *killed = NULL;

    pthread_mutex_lock(&blob->lock);
    for (struct job **at = &blob->jobs; *at;) {
        if ((*at)->deadline_ns <= now)
            move(at, &late);
        else if ((*at)->interrupted && is_dying((*at)->pid))
            move(at, &killed);
        else
            at = &(*at)->next;
    }
    pthread_mutex_unlock(&blob->lock);
    if (late) {
        atomic_fetch_add(&counters.deadline_errors, 1);
        log_line(LOG_ERROR, "a read had no answer of the store in time", blob->id, NULL);
    }
    if (killed)
        atomic_fetch_add(&counters.interrupted, 1);
    fail_all(late, EIO);
    fail_all(killed, EINTR);
}

static void *watch_clock(void *unused)
{
    struct blob *blob;

    for (;;) {
        pthread_mutex_lock(&clock_state.lock);
        while (!clock_state.waiting)
            pthread_cond_wait(&clock_state.some, &clock_state.lock);
        pthread_mutex_unlock(&clock_state.lock);
        nanosleep(&(struct timespec){ .tv_nsec = TICK_NS }, NULL);
        for (size_t n = 0; (blob = cache_at(n)); n++) {
            look_at(blob, now_ns());
            cache_unref(blob);
        }
    }
    return unused;
}

bool jobs_start(void)
{
    pthread_t thread;

    if (clock_state.started)
        return true;
    clock_state.started = true;
    if (pthread_create(&thread, NULL, watch_clock, NULL) != 0)
        return false;
    pthread_detach(thread);
    return true;
}
