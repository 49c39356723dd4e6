#define _GNU_SOURCE
#include "session.h"

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

struct outlet {
    struct source in;
    struct session *session;
    int index;
};

struct session {
    bool used, ready, interrupted;
    char name[MAX_NAME];
    pid_t pid;
    int cgroup;
    struct source ctl, feed, status;
    struct outlet out[2];
    struct job *current, *queue;
    struct call *opening, *closing;
    uint8_t *line; /* the encoded command on its way to the shell */
    size_t line_cap, line_n, line_at;
    char digits[8];
    size_t digits_n;
    uint64_t grace_us, rekill_us;
};

static struct session sessions[MAX_SESSIONS];

static struct session *find(struct mp_bytes name)
{
    for (struct session *s = sessions; s < sessions + MAX_SESSIONS; s++)
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
    for (struct session *s = sessions; s < sessions + MAX_SESSIONS; s++)
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

static void outlet_ready(struct source *source, uint32_t events)
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

static void feed_ready(struct source *source, uint32_t events)
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

static void status_ready(struct source *source, uint32_t events)
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
    struct session *s = find(args->session);
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

static void kill_all(struct session *s)
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
        kill_all(s); /* without a cgroup the shell cannot be told from what it started */
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
    for (struct session *s = sessions; s < sessions + MAX_SESSIONS; s++) {
        if (!s->used || !s->grace_us)
            continue;
        if (now >= s->grace_us) {
            s->grace_us = 0;
            kill_all(s);
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

static void session_free(struct session *s)
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

static void ctl_ready(struct source *source, uint32_t events)
{
    (void)events;
    read_ctl(owner_of(source, struct session, ctl));
}

bool sessions_reap(pid_t pid, int status)
{
    for (struct session *s = sessions; s < sessions + MAX_SESSIONS; s++) {
        if (!s->used || s->pid != pid)
            continue;
        if (!read_ctl(s))
            return true;
        finish_current(s, status, true);
        kill_all(s);
        fail_queue(s);
        session_free(s);
        return true;
    }
    return false;
}

/* --- opening -------------------------------------------------------------------------------- */

static void forget_call(struct call *call)
{
    for (struct session *s = sessions; s < sessions + MAX_SESSIONS; s++) {
        if (s->opening == call)
            s->opening = NULL;
        if (s->closing == call)
            s->closing = NULL;
    }
}

static void cancel(struct call *call)
{
    for (struct session *s = sessions; s < sessions + MAX_SESSIONS; s++)
        if (s->used && s->opening == call)
            kill_all(s);
    forget_call(call);
    call_fail(call, "timeout", "the call was cancelled");
}

static const struct call_ops session_ops = { .cancel = cancel, .drop = forget_call };

/* ours: out, err, feed, status, ctl */
static bool plumb(int ours[5], struct child_fds *child)
{
    int pair[2];
    for (int i = 0; i < 5; i++)
        ours[i] = -1;
    *child = (struct child_fds){ -1, -1, -1, -1, -1, -1 };
    if (!pipe_make(&ours[0], &child->out, true) || !pipe_make(&ours[1], &child->err, true) ||
        !pipe_make(&ours[2], &child->feed, false) || !pipe_make(&ours[3], &child->status, true) ||
        socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
        return false;
    ours[4] = pair[0];
    child->ctl = pair[1];
    return true;
}

static void close_child(const struct child_fds *child)
{
    int fds[] = { child->out, child->err, child->feed, child->status, child->ctl };
    for (int i = 0; i < 5; i++)
        if (fds[i] >= 0)
            close(fds[i]);
}

static int launch(struct session *s, const struct session_args *args)
{
    int ours[5];
    struct child_fds child;
    s->cgroup = cgroup_acquire();
    if (s->cgroup == CGROUP_FULL)
        return -ENOSPC;
    bool ok = plumb(ours, &child);
    pid_t pid = ok ? child_fork(cgroup_fd(s->cgroup)) : -errno;
    if (pid == 0)
        shell_child(args, &child);
    close_child(&child);
    struct source *sources[] = { &s->out[0].in, &s->out[1].in, &s->feed, &s->status, &s->ctl };
    void (*ready[])(struct source *, uint32_t) = { outlet_ready, outlet_ready, feed_ready,
                                                   status_ready, ctl_ready };
    for (int i = 0; i < 5; i++) {
        uint32_t events = i == 2 ? 0 : EPOLLIN;
        if (ours[i] >= 0 && (pid < 0 || !source_open(sources[i], ours[i], events, ready[i]))) {
            close(ours[i]);
            sources[i]->fd = -1;
            pid = pid > 0 ? -ENOSPC : pid;
        }
    }
    s->pid = pid > 0 ? pid : 0;
    return pid > 0 ? 0 : pid;
}

void session_open(struct call *call, const struct session_args *args)
{
    struct session *s = sessions;
    if (find(args->name)) {
        call_fail(call, "already_exists", "session %.*s is open", (int)args->name.n, args->name.p);
        return;
    }
    while (s < sessions + MAX_SESSIONS && s->used)
        s++;
    if (s == sessions + MAX_SESSIONS) {
        call_fail(call, "exhausted", "at most %d sessions can be open", MAX_SESSIONS);
        return;
    }
    memset(s, 0, sizeof *s);
    s->used = true;
    s->ctl.fd = s->feed.fd = s->status.fd = -1;
    for (int i = 0; i < 2; i++)
        s->out[i] = (struct outlet){ .in.fd = -1, .session = s, .index = i };
    memcpy(s->name, args->name.p, args->name.n);
    call->ops = &session_ops;
    int err = launch(s, args);
    if (err < 0) {
        kill_all(s);
        session_free(s);
        call_fail(call, "exhausted", "the session's shell cannot be started: %s", strerror(-err));
        return;
    }
    s->opening = call;
}

void session_close(struct call *call, struct mp_bytes name)
{
    struct session *s = find(name);
    if (!s) {
        call_fail(call, "not_found", "no such session: %.*s", (int)name.n, name.p);
        return;
    }
    if (s->closing) {
        call_fail(call, "wrong_state", "session %s is closing", s->name);
        return;
    }
    call->ops = &session_ops;
    s->closing = call;
    kill_all(s);
}

void session_list(struct call *call)
{
    struct mp_writer w = reply_begin(call);
    mp_put_array(&w, sessions_count());
    for (struct session *s = sessions; s < sessions + MAX_SESSIONS; s++)
        if (s->used)
            mp_put_text(&w, s->name);
    reply_send(call, &w);
}
