#include "session_state.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "cgroup.h"
#include "process.h"

#define REKILL_US 20000

struct session *sessions, *sessions_end;

bool session_table_open(void)
{
    sessions = sessions_end = table_alloc(MAX_SESSIONS * sizeof *sessions);
    return sessions != NULL;
}

struct session *session_find(struct mp_bytes name)
{
    for (struct session *s = sessions; s < sessions_end; s++)
        if (s->used && mp_equal(name, s->name))
            return s;
    return NULL;
}

const char *session_name(const struct job *job)
{
    return job->session ? job->session->name : "";
}

unsigned sessions_count(void)
{
    unsigned n = 0;
    for (struct session *s = sessions; s < sessions_end; s++)
        n += s->used;
    return n;
}

/* --- the shell's outputs -------------------------------------------------------------------- */

static size_t outlet_take(struct outlet *outlet)
{
    struct session *s = outlet->session;
    ssize_t n = read(outlet->in.fd, scratch, READ_CHUNK);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return 0;
    if (n <= 0) {
        source_close(&outlet->in);
        return 0;
    }
    scratch_used((size_t)n);
    if (s->current) /* between commands only leftovers of background processes come: dropped */
        stream_store(&s->current->out[outlet->index], scratch, (size_t)n);
    return (size_t)n;
}

void session_outlet_ready(struct source *source, uint32_t events)
{
    struct outlet *outlet = owner_of(source, struct outlet, in);
    (void)events;
    outlet_take(outlet);
    if (outlet->session->current)
        job_pump(outlet->session->current);
}

/* What the pipes hold now was written before the status: it belongs to the command. */
static void outlets_drain(struct session *s)
{
    for (int i = 0; i < 2; i++) {
        int waiting = 0;
        if (s->out[i].in.fd >= 0)
            ioctl(s->out[i].in.fd, FIONREAD, &waiting);
        for (size_t left = (size_t)waiting; left && s->out[i].in.fd >= 0;) {
            size_t n = outlet_take(&s->out[i]);
            if (!n || n >= left)
                break;
            left -= n;
        }
    }
}

/* --- feeding commands ----------------------------------------------------------------------- */

static void line_drop(struct session *s)
{
    map_free(s->line, s->line_cap);
    s->line = NULL;
    s->line_cap = s->line_n = s->line_at = 0;
}

/* See `driver` in exec_child.c for the form. */
static bool line_encode(struct session *s, const uint8_t *text, size_t n)
{
    bool plain = !memchr(text, '\n', n);
    s->line_cap = 2 * n + 2;
    s->line = map_alloc(s->line_cap);
    if (!s->line)
        return false;
    uint8_t *p = s->line;
    *p++ = plain ? 'e' : 'b';
    for (size_t i = 0; i < n; i++) {
        if (!plain && (text[i] == '\\' || text[i] == '\n'))
            *p++ = '\\';
        *p++ = !plain && text[i] == '\n' ? 'n' : text[i];
    }
    *p++ = '\n';
    s->line_n = (size_t)(p - s->line);
    return true;
}

static void line_send(struct session *s)
{
    while (s->line_at < s->line_n) {
        ssize_t n = write(s->feed.fd, s->line + s->line_at, s->line_n - s->line_at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN) {
            source_watch(&s->feed, EPOLLOUT);
            return;
        }
        if (n < 0)
            break; /* the shell is gone; its end is reported by its reaping */
        s->line_at += (size_t)n;
    }
    source_watch(&s->feed, 0);
    line_drop(s);
}

void session_feed_ready(struct source *source, uint32_t events)
{
    (void)events;
    line_send(owner_of(source, struct session, feed));
}

static void start_next(struct session *s)
{
    while (s->ready && !s->current && s->queue) {
        struct job *job = s->queue;
        s->queue = job->session_next;
        job->session_next = NULL;
        bool encoded = line_encode(s, job->text, job->text_n);
        map_free(job->text, job->text_n);
        job->text = NULL;
        job->text_n = 0;
        if (!encoded) {
            struct failure failure = { .code = "exhausted", .message = "no memory for the command" };
            job->session = NULL;
            job_fail(job, &failure);
            continue;
        }
        s->current = job;
        s->interrupted = false;
        job->pid = s->pid;
        job_started(job);
        line_send(s);
    }
}

static void finish_current(struct session *s, int status, bool session_ended)
{
    struct job *job = s->current;
    if (!job)
        return;
    outlets_drain(s);
    s->current = NULL;
    s->grace_us = 0;
    line_drop(s);
    source_watch(&s->feed, 0);
    job->session = NULL;
    job->session_ended = session_ended;
    job_ended(job, s->interrupted ? SIGKILL : status);
    s->interrupted = false;
}

void session_status_ready(struct source *source, uint32_t events)
{
    struct session *s = owner_of(source, struct session, status);
    char text[16];
    (void)events;
    ssize_t n = read(source->fd, text, sizeof text);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0) {
        source_close(source); /* `exec` in the shell: what it became ends the session */
        return;
    }
    for (ssize_t i = 0; i < n; i++) {
        if (text[i] != '\n') {
            if (s->digits_n < sizeof s->digits - 1)
                s->digits[s->digits_n++] = text[i];
            continue;
        }
        uint32_t code = 0;
        parse_number(s->digits, s->digits_n, &code);
        s->digits_n = 0;
        finish_current(s, (int)(code & 0xff) << 8, false);
    }
    start_next(s);
}

bool session_submit(struct job *job, const struct exec_args *args, struct failure *failure)
{
    struct session *s = session_find(args->session);
    *failure = (struct failure){ .code = "not_found" };
    if (!s) {
        snprintf(failure->message, sizeof failure->message, "no such session: %.*s",
                 (int)args->session.n, args->session.p);
        return false;
    }
    failure->code = "invalid_argument";
    snprintf(failure->message, sizeof failure->message, "a session's command has at most %u bytes",
             MAX_COMMAND);
    if (args->shell.n > MAX_COMMAND)
        return false;
    failure->code = "exhausted";
    snprintf(failure->message, sizeof failure->message, "no memory to queue the command");
    job->text_n = args->shell.n ? args->shell.n : 1;
    job->text = map_alloc(job->text_n);
    if (!job->text)
        return false;
    memcpy(job->text, args->shell.n ? args->shell.p : (const uint8_t *)":", job->text_n);
    job->session = s;
    job->state = JOB_QUEUED;
    struct job **link = &s->queue;
    while (*link)
        link = &(*link)->session_next;
    *link = job;
    start_next(s);
    return true;
}

void session_forget(struct job *job)
{
    struct session *s = job->session;
    for (struct job **link = &s->queue; *link; link = &(*link)->session_next)
        if (*link == job) {
            *link = job->session_next;
            break;
        }
    if (s->current == job)
        s->current = NULL;
    job->session = NULL;
}

/* --- ends ----------------------------------------------------------------------------------- */

void session_kill(struct session *s)
{
    if (s->cgroup >= 0)
        cgroup_kill(s->cgroup);
    else if (s->pid > 0)
        tree_kill(s->pid);
}

void session_signal(struct job *job, int signal)
{
    struct session *s = job->session;
    if (s && s->current == job)
        cgroup_signal_others(s->cgroup, s->pid, signal);
}

void session_interrupt(struct job *job)
{
    struct session *s = job->session;
    if (s->current != job) {
        session_forget(job);
        job->started_us = now_us();
        job_ended(job, SIGKILL);
        return;
    }
    s->interrupted = true;
    if (s->cgroup < 0) {
        session_kill(s); /* without a cgroup the shell cannot be told from what it started */
        return;
    }
    uint64_t now = now_us();
    s->grace_us = now + SESSION_GRACE_US;
    s->rekill_us = now + REKILL_US;
    cgroup_kill_others(s->cgroup, s->pid);
}

uint64_t sessions_tick(uint64_t now)
{
    uint64_t due = 0;
    for (struct session *s = sessions; s < sessions_end; s++) {
        if (!s->used || !s->grace_us)
            continue;
        if (now >= s->grace_us) {
            s->grace_us = 0;
            session_kill(s);
            continue;
        }
        if (now >= s->rekill_us) {
            cgroup_kill_others(s->cgroup, s->pid); /* what was forked meanwhile */
            s->rekill_us = now + REKILL_US;
        }
        uint64_t next = s->rekill_us < s->grace_us ? s->rekill_us : s->grace_us;
        if (!due || next < due)
            due = next;
    }
    return due;
}

static void fail_queue(struct session *s)
{
    struct failure failure = { .code = "wrong_state" };
    snprintf(failure.message, sizeof failure.message, "session %s has ended", s->name);
    while (s->queue) {
        struct job *job = s->queue;
        s->queue = job->session_next;
        job->session = NULL;
        job_fail(job, &failure);
    }
}

void session_free(struct session *s)
{
    source_close(&s->ctl);
    source_close(&s->feed);
    source_close(&s->status);
    for (int i = 0; i < 2; i++)
        if (s->out[i].in.fd >= 0)
            drain_adopt(source_release(&s->out[i].in));
    line_drop(s);
    cgroup_release(s->cgroup);
    struct call *closing = s->closing;
    memset(s, 0, sizeof *s);
    if (closing)
        reply_nil(closing);
}

static void open_failed(struct session *s, const struct failure *failure)
{
    struct call *call = s->opening;
    s->opening = NULL;
    fail_queue(s);
    session_free(s);
    if (call)
        call_fail_with(call, failure);
}

/* False: the shell could not be started and the session is gone. */
static bool read_ctl(struct session *s)
{
    int passed;
    while (s->ctl.fd >= 0) {
        ssize_t n = ctl_receive(s->ctl.fd, scratch, &passed);
        if (passed >= 0)
            close(passed);
        if (n < 0)
            return true;
        if (n > 0 && scratch[0] == REPORT_FAILED) {
            struct failure failure;
            failure_of_report(scratch, (size_t)n, &failure);
            open_failed(s, &failure);
            return false;
        }
        if (n > 0)
            continue;
        source_close(&s->ctl);
        s->ready = true;
        struct call *call = s->opening;
        s->opening = NULL;
        if (call)
            reply_nil(call);
        start_next(s);
    }
    return true;
}

void session_ctl_ready(struct source *source, uint32_t events)
{
    (void)events;
    read_ctl(owner_of(source, struct session, ctl));
}

bool sessions_reap(pid_t pid, int status)
{
    for (struct session *s = sessions; s < sessions_end; s++) {
        if (!s->used || s->pid != pid)
            continue;
        if (!read_ctl(s))
            return true;
        finish_current(s, status, true);
        session_kill(s);
        fail_queue(s);
        session_free(s);
        return true;
    }
    return false;
}

bool sessions_stopped(pid_t pid)
{
    struct failure failure = {
        .code = "unavailable",
        .message = "the session's shell was stopped from inside the sandbox before it could start",
    };
    for (struct session *s = sessions; s < sessions_end; s++) {
        if (!s->used || s->pid != pid)
            continue;
        if (read_ctl(s) && !s->ready) {
            session_kill(s);
            open_failed(s, &failure);
        }
        return true;
    }
    return false;
}
