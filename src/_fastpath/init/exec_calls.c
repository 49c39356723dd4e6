#include "exec_calls.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>

#include "cgroup.h"
#include "job.h"
#include "session.h"

static void begin(struct call *call, struct mp_bytes raw, const struct call_ops *ops)
{
    struct exec_args args;
    struct failure failure;
    const char *problem = args_exec(raw, &args);
    if (problem) {
        call_fail(call, "invalid_argument", "%s", problem);
        return;
    }
    struct job *job = job_find(args.cid);
    call->ops = ops;
    call->streaming = args.stream && ops == &run_ops;
    if (job) { /* the same command asked for again: its one result, not a second run */
        job_attach(job, call);
        ops->pump(call);
        return;
    }
    job = job_new(&args);
    if (!job) {
        call_fail(call, "exhausted", "%d commands are running", MAX_JOBS);
        return;
    }
    job_attach(job, call);
    bool ok = args.session.p ? session_submit(job, &args, &failure)
                             : job_launch(job, &args, &failure);
    if (!ok)
        job_fail(job, &failure);
    else if (job->state == JOB_QUEUED)
        job_pump(job);
}

void exec_run(struct call *call, struct mp_bytes args)
{
    begin(call, args, &run_ops);
}

void exec_start(struct call *call, struct mp_bytes args)
{
    begin(call, args, &start_ops);
}

/* The job that the arguments name, or NULL and the call is answered. */
static struct job *named(struct call *call, struct mp_bytes raw, const char *fields,
                         struct command_args *args)
{
    const char *problem = args_command(raw, fields, args);
    if (problem) {
        call_fail(call, "invalid_argument", "%s", problem);
        return NULL;
    }
    struct job *job = job_find(args->cid);
    if (!job)
        call_fail(call, "not_found", "no such command: %.*s", (int)args->cid.n, args->cid.p);
    return job;
}

static void follow(struct call *call, struct mp_bytes raw, const struct call_ops *ops)
{
    struct command_args args;
    struct job *job = named(call, raw, "cid stdout_offset stderr_offset", &args);
    if (!job)
        return;
    call->ops = ops;
    call->streaming = true;
    call->offset[0] = args.stdout_offset.value;
    call->offset[1] = args.stderr_offset.value;
    job_attach(job, call);
    ops->pump(call);
}

void exec_attach(struct call *call, struct mp_bytes args)
{
    follow(call, args, &attach_ops);
}

void exec_wait(struct call *call, struct mp_bytes args)
{
    follow(call, args, &wait_ops);
}

static void stdin_cancel(struct call *call)
{
    stdin_forget(call);
    call_fail(call, "timeout", "the call was cancelled; part of its data may have been written");
}

static void stdin_pump(struct call *call)
{
    (void)call; /* advanced by the pipe */
}

static const struct call_ops stdin_ops = { .pump = stdin_pump, .cancel = stdin_cancel };

void exec_stdin(struct call *call, struct mp_bytes raw)
{
    struct command_args args;
    struct job *job = named(call, raw, "cid data eof", &args);
    if (!job)
        return;
    call->ops = &stdin_ops;
    call->job = job;
    stdin_write(call, args.data, args.eof);
}

void exec_signal(struct call *call, struct mp_bytes raw)
{
    struct command_args args;
    struct job *job = named(call, raw, "cid signal", &args);
    if (!job)
        return;
    uint64_t signal = args.signal.set ? args.signal.value : SIGTERM;
    if (signal < 1 || signal > 64) {
        call_fail(call, "invalid_argument", "field \"signal\" is out of range");
    } else if (job->state != JOB_RUNNING) {
        call_fail(call, "wrong_state", "command %s is not running", job->cid);
    } else if (job->session) {
        session_signal(job, (int)signal);
        reply_nil(call);
    } else if (kill(job->pid, (int)signal) < 0) {
        call_fail(call, "wrong_state", "command %s cannot be signalled: %s", job->cid,
                  strerror(errno));
    } else {
        reply_nil(call);
    }
}

/* `signal` of the shared arguments means nothing here: it is always SIGKILL. */
void exec_kill(struct call *call, struct mp_bytes raw)
{
    struct command_args args;
    struct job *job = named(call, raw, "cid signal", &args);
    if (!job)
        return;
    job_kill(job); /* of one that has ended: what it left in the background */
    reply_nil(call);
}

void exec_resize(struct call *call, struct mp_bytes raw)
{
    struct command_args args;
    struct job *job = named(call, raw, "cid rows cols", &args);
    if (!job)
        return;
    struct winsize size = { .ws_row = (unsigned short)args.rows.value,
                            .ws_col = (unsigned short)args.cols.value };
    if (!args.rows.value || !args.cols.value || args.rows.value > 65535 ||
        args.cols.value > 65535)
        call_fail(call, "invalid_argument", "fields \"rows\" and \"cols\" are 1 to 65535");
    else if (!job->pty || job->in.fd < 0 || ioctl(job->in.fd, TIOCSWINSZ, &size) < 0)
        call_fail(call, "wrong_state", "command %s has no terminal now", job->cid);
    else
        reply_nil(call);
}

void exec_list(struct call *call, struct mp_bytes raw)
{
    const char *problem = args_nothing(raw);
    if (problem) {
        call_fail(call, "invalid_argument", "%s", problem);
        return;
    }
    uint32_t n = 0;
    for (struct job *job = jobs_next(NULL); job; job = jobs_next(job))
        n += !job->answered;
    struct mp_writer w = reply_begin(call);
    mp_put_array(&w, n);
    for (struct job *job = jobs_next(NULL); job; job = jobs_next(job))
        if (!job->answered)
            put_command_info(&w, job);
    reply_send(call, &w);
}

void exec_forget(struct call *call, struct mp_bytes raw)
{
    struct command_args args;
    struct job *job = named(call, raw, "cid signal", &args);
    if (!job)
        return;
    if (job->state != JOB_ENDED || job->calls) {
        call_fail(call, "wrong_state", "command %s is running or being read", job->cid);
        return;
    }
    job_free(job);
    reply_nil(call);
}
