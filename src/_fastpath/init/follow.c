/* Calls that follow a command: run and attach stream its output, start and wait do not. */
#include <string.h>
#include <sys/wait.h>

#include "job.h"
#include "session.h"

static uint64_t pending(const struct call *call, int i)
{
    uint64_t kept = call->job->out[i].kept;
    if (call->limited && call->limit[i] < kept)
        kept = call->limit[i];
    return kept > call->offset[i] ? kept - call->offset[i] : 0;
}

/* One `Output` of stream `i`; false when nothing can be sent now. */
static bool send_output(struct call *call, int i)
{
    uint64_t n = pending(call, i);
    if (!n || !call->credit || !conn_room(call->conn))
        return false;
    if (n > READ_CHUNK)
        n = READ_CHUNK;
    struct mp_writer w = frame_begin();
    mp_put_array(&w, 3);
    mp_put_u64(&w, 3);
    mp_put_u64(&w, call->id);
    mp_put_map(&w, 3);
    mp_put_text(&w, "stream");
    mp_put_u64(&w, (uint64_t)i + 1);
    mp_put_text(&w, "offset");
    mp_put_u64(&w, call->offset[i]);
    mp_put_text(&w, "data");
    mp_put_bin_head(&w, (size_t)n);
    if (stream_read(&call->job->out[i], call->offset[i], w.p, (size_t)n) != n)
        return false;
    w.p += n;
    call->offset[i] += n;
    call->credit--;
    frame_send(call->conn, &w);
    return true;
}

static void put_bytes(struct mp_writer *w, const char *key, const struct call *call, int i)
{
    size_t n = (size_t)pending(call, i);
    mp_put_text(w, key);
    mp_put_bin_head(w, n);
    if (w->overflow || (size_t)(w->end - w->p) < n) {
        w->overflow = true;
        return;
    }
    w->p += stream_read(&call->job->out[i], call->offset[i], w->p, n);
}

static void put_flag(struct mp_writer *w, const char *key)
{
    mp_put_text(w, key);
    mp_put_bool(w, true);
}

/* The `CommandResult`; with `inline_output` it carries what was not streamed. */
static void put_result(struct mp_writer *w, const struct call *call, bool inline_output)
{
    const struct job *job = call->job;
    bool truncated = job->out[0].full || job->out[1].full;
    uint32_t flags = (uint32_t)(job->timed_out + job->disk_full + truncated + job->session_ended);
    mp_put_map(w, 5 + flags + (inline_output ? 2 : 0));
    mp_put_text(w, "cid");
    mp_put_text(w, job->cid);
    mp_put_text(w, WIFSIGNALED(job->status) ? "signal" : "exit_code");
    mp_put_u64(w, (uint64_t)(WIFSIGNALED(job->status) ? WTERMSIG(job->status)
                                                      : WEXITSTATUS(job->status)));
    mp_put_text(w, "stdout_total");
    mp_put_u64(w, job->out[0].total);
    mp_put_text(w, "stderr_total");
    mp_put_u64(w, job->out[1].total);
    mp_put_text(w, "duration_s");
    mp_put_f64(w, (double)(job->ended_us - job->started_us) / 1e6);
    if (job->timed_out)
        put_flag(w, "timed_out");
    if (job->disk_full)
        put_flag(w, "disk_full");
    if (truncated)
        put_flag(w, "output_truncated");
    if (job->session_ended)
        put_flag(w, "session_ended");
    if (inline_output) {
        put_bytes(w, "stdout", call, 0);
        put_bytes(w, "stderr", call, 1);
    }
}

static void reply_result(struct call *call, bool inline_output)
{
    struct mp_writer w = reply_begin(call);
    put_result(&w, call, inline_output);
    reply_send(call, &w);
}

static void follow_pump(struct call *call)
{
    struct job *job = call->job;
    if (!job || job->state < JOB_RUNNING)
        return;
    bool ended = job->state == JOB_ENDED;
    if (ended && !call->limited) {
        /* An orphan's later output is for a later attach: it must not keep this call open. */
        call->limited = true;
        for (int i = 0; i < 2; i++)
            call->limit[i] = job->out[i].kept;
    }
    if (!call->streaming && pending(call, 0) + pending(call, 1) > INLINE_BYTES)
        call->streaming = true;
    if (call->streaming && !call->cancelled)
        while (send_output(call, 0) || send_output(call, 1))
            ;
    if (!ended || (!call->cancelled && !conn_room(call->conn)))
        return;
    if (call->streaming && !call->cancelled && pending(call, 0) + pending(call, 1))
        return;
    bool foreground = call->ops == &run_ops && !job->background;
    reply_result(call, !call->streaming && !call->cancelled);
    job->answered |= foreground;
}

static void run_cancel(struct call *call)
{
    call->cancelled = true;
    if (call->job->state != JOB_ENDED && !call->job->background)
        job_kill(call->job);
    if (call->job)
        follow_pump(call);
}

static void give_up(struct call *call)
{
    job_detach(call);
    call_fail(call, "timeout", "the call was cancelled; the command goes on");
}

static void start_pump(struct call *call)
{
    if (call->job->state < JOB_RUNNING && !(call->job->state == JOB_QUEUED))
        return;
    struct mp_writer w = reply_begin(call);
    put_command_info(&w, call->job);
    reply_send(call, &w);
}

static void start_cancel(struct call *call)
{
    job_kill(call->job);
}

static void wait_pump(struct call *call)
{
    if (call->job->state == JOB_ENDED)
        reply_result(call, false);
}

void put_command_info(struct mp_writer *w, const struct job *job)
{
    mp_put_map(w, 7);
    mp_put_text(w, "cid");
    mp_put_text(w, job->cid);
    mp_put_text(w, "running");
    mp_put_bool(w, job->state != JOB_ENDED);
    mp_put_text(w, "pid");
    mp_put_u64(w, (uint64_t)job->pid);
    mp_put_text(w, "command");
    mp_put_bin(w, job->command, job->command_n);
    mp_put_text(w, "background");
    mp_put_bool(w, job->background);
    mp_put_text(w, "session");
    mp_put_text(w, session_name(job));
    mp_put_text(w, "started_at");
    mp_put_f64(w, job->started_at);
}

const struct call_ops run_ops = { .pump = follow_pump, .cancel = run_cancel };
const struct call_ops attach_ops = { .pump = follow_pump, .cancel = give_up };
const struct call_ops start_ops = { .pump = start_pump, .cancel = start_cancel };
const struct call_ops wait_ops = { .pump = wait_pump, .cancel = give_up };
