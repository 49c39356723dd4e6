/* Opening, closing and listing sessions. */
#include "session_state.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "cgroup.h"

static void forget_call(struct call *call)
{
    for (struct session *s = sessions; s < sessions_end; s++) {
        if (s->opening == call)
            s->opening = NULL;
        if (s->closing == call)
            s->closing = NULL;
    }
}

static void cancel(struct call *call)
{
    for (struct session *s = sessions; s < sessions_end; s++)
        if (s->used && s->opening == call)
            session_kill(s);
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
    *child = (struct child_fds){ -1, -1, -1, -1, -1, -1, false };
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
    void (*ready[])(struct source *, uint32_t) = { session_outlet_ready, session_outlet_ready,
                                                   session_feed_ready,
                                                   session_status_ready, session_ctl_ready };
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
    if (session_find(args->name)) {
        call_fail(call, "already_exists", "session %.*s is open", (int)args->name.n, args->name.p);
        return;
    }
    while (s < sessions_end && s->used)
        s++;
    if (s == sessions + MAX_SESSIONS) {
        call_fail(call, "exhausted", "at most %d sessions can be open", MAX_SESSIONS);
        return;
    }
    if (s == sessions_end)
        sessions_end++;
    memset(s, 0, sizeof *s);
    s->used = true;
    s->ctl.fd = s->feed.fd = s->status.fd = -1;
    for (int i = 0; i < 2; i++)
        s->out[i] = (struct outlet){ .in.fd = -1, .session = s, .index = i };
    memcpy(s->name, args->name.p, args->name.n);
    call->ops = &session_ops;
    int err = launch(s, args);
    if (err < 0) {
        session_kill(s);
        session_free(s);
        call_fail(call, "exhausted", "the session's shell cannot be started: %s", strerror(-err));
        return;
    }
    s->opening = call;
}

void session_close(struct call *call, struct mp_bytes name)
{
    struct session *s = session_find(name);
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
    session_kill(s);
}

void session_list(struct call *call)
{
    struct mp_writer w = reply_begin(call);
    mp_put_array(&w, sessions_count());
    for (struct session *s = sessions; s < sessions_end; s++)
        if (s->used)
            mp_put_text(&w, s->name);
    reply_send(call, &w);
}
