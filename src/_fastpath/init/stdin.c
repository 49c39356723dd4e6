/* Feeding a command's standard input without ever blocking on it. */
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "job.h"

static uint64_t queued; /* bytes of all waiting exec.stdin calls */

static void stdin_ready(struct source *source, uint32_t events);

bool stdin_open(struct job *job, int fd, struct mp_bytes input)
{
    source_open(&job->in, fd, 0, stdin_ready);
    if (input.n) {
        ssize_t n = write(fd, input.p, input.n);
        size_t done = n > 0 ? (size_t)n : 0;
        if (done < input.n) {
            job->input = map_alloc(input.n - done);
            if (!job->input)
                return false;
            memcpy(job->input, input.p + done, input.n - done);
            job->input_n = input.n - done;
            source_watch(&job->in, EPOLLOUT);
            return true;
        }
    }
    if (!job->want_stdin && !job->pty)
        source_close(&job->in);
    return true;
}

void stdin_forget(struct call *call)
{
    if (!call->data)
        return;
    queued -= call->data_cap;
    map_free(call->data, call->data_cap);
    call->data = NULL;
    struct job *job = call->job;
    if (!job)
        return;
    for (struct call **link = &job->stdin_calls; *link; link = &(*link)->job_next)
        if (*link == call) {
            *link = call->job_next;
            break;
        }
    call->job = NULL;
}

void stdin_close(struct job *job)
{
    source_close(&job->in);
    map_free(job->input, job->input_n);
    job->input = NULL;
    job->input_n = job->input_at = 0;
    while (job->stdin_calls) {
        struct call *call = job->stdin_calls;
        stdin_forget(call);
        call_fail(call, "wrong_state", "command %s closed its stdin or ended", job->cid);
    }
}

/* Write what the pipe takes; false: nobody reads it any more. */
static bool feed(struct job *job, const uint8_t *data, size_t n, size_t *done)
{
    while (*done < n) {
        ssize_t wrote = write(job->in.fd, data + *done, n - *done);
        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote < 0)
            return errno == EAGAIN;
        *done += (size_t)wrote;
        if (wrote > 0)
            job->stdin_last = data[*done - 1];
    }
    return true;
}

static void finish(struct job *job)
{
    if (!job->pty) {
        source_close(&job->in);
        return;
    }
    /* A terminal ends its input by a character; in the middle of a line one only ends the line. */
    size_t done = 0;
    bool mid_line = job->stdin_last && job->stdin_last != '\n' && job->stdin_last != 4;
    feed(job, (const uint8_t *)"\4\4", mid_line ? 2 : 1, &done);
}

/* Advance the queue; false when the pipe is full or gone. */
static bool advance(struct job *job)
{
    if (job->input) {
        if (!feed(job, job->input, job->input_n, &job->input_at)) {
            stdin_close(job);
            return false;
        }
        if (job->input_at < job->input_n)
            return false;
        map_free(job->input, job->input_n);
        job->input = NULL;
        if (!job->want_stdin && !job->pty)
            source_close(&job->in);
    }
    while (job->stdin_calls && job->in.fd >= 0) {
        struct call *call = job->stdin_calls;
        if (!feed(job, call->data, call->data_len, &call->data_start)) {
            stdin_close(job);
            return false;
        }
        if (call->data_start < call->data_len)
            return false;
        bool eof = call->eof;
        stdin_forget(call);
        reply_nil(call);
        if (eof)
            finish(job);
    }
    return job->in.fd >= 0;
}

static void stdin_ready(struct source *source, uint32_t events)
{
    struct job *job = owner_of(source, struct job, in);
    (void)events;
    if (advance(job))
        source_watch(&job->in, 0);
}

static bool enqueue(struct call *call, struct job *job, struct mp_bytes data, size_t done, bool eof)
{
    size_t n = data.n - done;
    size_t cap = n ? n : 1; /* an eof behind other data waits its turn as well */
    if (queued + cap > STDIN_QUEUED || !(call->data = map_alloc(cap)))
        return false;
    memcpy(call->data, data.p + done, n);
    call->data_cap = cap;
    call->data_len = n;
    call->eof = eof;
    queued += cap;
    struct call **link = &job->stdin_calls;
    while (*link)
        link = &(*link)->job_next;
    *link = call;
    call->job = job;
    source_watch(&job->in, EPOLLOUT);
    return true;
}

void stdin_write(struct call *call, struct mp_bytes data, bool eof)
{
    static const uint8_t nothing;
    struct job *job = call->job;
    call->job = NULL;
    if (!data.p)
        data.p = &nothing;
    if (job->in.fd < 0) {
        call_fail(call, "wrong_state", "command %s %s", job->cid,
                  job->state == JOB_ENDED ? "has ended"
                  : job->want_stdin       ? "has no open stdin any more"
                                          : "was started without stdin");
        return;
    }
    size_t done = 0;
    if (!job->input && !job->stdin_calls && !feed(job, data.p, data.n, &done)) {
        stdin_close(job);
        call_fail(call, "wrong_state", "command %s closed its stdin", job->cid);
        return;
    }
    if (done < data.n || job->input || job->stdin_calls) {
        if (!enqueue(call, job, data, done, eof))
            call_fail(call, "exhausted", "too much stdin is waiting to be read");
        return;
    }
    reply_nil(call);
    if (eof)
        finish(job);
}
