#include "job.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cgroup.h"
#include "config.h"
#include "process.h"
#include "session.h"

static struct job *jobs;
static unsigned jobs_high;

bool job_table_open(void)
{
    jobs = table_alloc(MAX_JOBS * sizeof *jobs);
    return jobs != NULL;
}

struct job *jobs_next(struct job *after)
{
    for (struct job *job = after ? after + 1 : jobs; job < jobs + jobs_high; job++)
        if (job->state != JOB_FREE)
            return job;
    return NULL;
}

struct job *job_find(struct mp_bytes cid)
{
    for (struct job *job = jobs_next(NULL); job; job = jobs_next(job))
        if (mp_equal(cid, job->cid))
            return job;
    return NULL;
}

unsigned jobs_running(void)
{
    unsigned n = 0;
    for (struct job *job = jobs_next(NULL); job; job = jobs_next(job))
        n += job->state != JOB_ENDED;
    return n;
}

/* Forget the finished command that ended first; `answered`: only among those. */
static bool forget_oldest(bool answered)
{
    struct job *oldest = NULL;
    for (struct job *job = jobs_next(NULL); job; job = jobs_next(job))
        if (job->state == JOB_ENDED && !job->calls && (job->answered || !answered) &&
            (!oldest || job->ended_us < oldest->ended_us))
            oldest = job;
    if (oldest)
        job_free(oldest);
    return oldest != NULL;
}

void jobs_trim(void)
{
    unsigned finished = 0, answered = 0;
    for (struct job *job = jobs_next(NULL); job; job = jobs_next(job)) {
        finished += job->state == JOB_ENDED;
        answered += job->state == JOB_ENDED && job->answered;
    }
    while (answered > MAX_FOREGROUND && forget_oldest(true)) {
        answered--;
        finished--;
    }
    while (finished > MAX_FINISHED && (forget_oldest(true) || forget_oldest(false)))
        finished--;
}

static struct job *free_slot(void)
{
    for (unsigned i = 0; i < jobs_high; i++)
        if (jobs[i].state == JOB_FREE)
            return &jobs[i];
    return jobs_high < MAX_JOBS ? &jobs[jobs_high++] : NULL;
}

/* What `exec.list` shows: the shell text, or the words of argv with blanks between. */
static void describe(struct job *job, const struct exec_args *args)
{
    struct mp_writer w = mp_writer_of(job->command, sizeof job->command);
    struct mp_reader r = mp_reader_of(args->argv.p, args->argv.n);
    uint32_t n = args->argv.p ? mp_get_array(&r) : 1;
    for (uint32_t i = 0; i < n; i++) {
        struct mp_bytes word = args->argv.p ? mp_get_bytes(&r) : args->shell;
        size_t room = (size_t)(w.end - w.p);
        if (i)
            mp_put_raw(&w, " ", 1);
        mp_put_raw(&w, word.p, word.n < room ? word.n : room ? room - 1 : 0);
    }
    job->command_n = mp_written(&w);
}

struct job *job_new(const struct exec_args *args)
{
    struct job *job = free_slot();
    if (!job && forget_oldest(false))
        job = free_slot();
    if (!job)
        return NULL;
    memset(job, 0, sizeof *job);
    memcpy(job->cid, args->cid.p, args->cid.n);
    describe(job, args);
    job->ctl.fd = job->in.fd = -1;
    job->cgroup = NO_CGROUP;
    job->background = args->background;
    job->pty = args->pty;
    job->want_stdin = args->want_stdin;
    job->limit = config.output_limit;
    if (args->output_limit.set && args->output_limit.value < job->limit)
        job->limit = args->output_limit.value;
    if (args->timeout_s.set)
        job->timeout_us = args->timeout_s.value > 1e9 ? 0 : (uint64_t)(args->timeout_s.value * 1e6) + 1;
    stream_open(&job->out[0], job);
    stream_open(&job->out[1], job);
    job->started_at = now_wall();
    job->state = JOB_STARTING;
    return job;
}

void job_free(struct job *job)
{
    if (job->session)
        session_forget(job);
    source_close(&job->ctl);
    stdin_close(job);
    stream_free(&job->out[0]);
    stream_free(&job->out[1]);
    map_free(job->text, job->text_n);
    cgroup_release(job->cgroup);
    memset(job, 0, sizeof *job);
}

void job_attach(struct job *job, struct call *call)
{
    call->job = job;
    call->job_next = job->calls;
    job->calls = call;
}

void job_detach(struct call *call)
{
    struct job *job = call->job;
    if (!job)
        return;
    for (struct call **link = &job->calls; *link; link = &(*link)->job_next)
        if (*link == call) {
            *link = call->job_next;
            call->job = NULL;
            call->job_next = NULL;
            return;
        }
}

void job_pump(struct job *job)
{
    struct call *next;
    for (struct call *call = job->calls; call; call = next) {
        next = call->job_next;
        call->ops->pump(call);
    }
}

void job_fail(struct job *job, const struct failure *failure)
{
    while (job->calls) {
        struct call *call = job->calls;
        job_detach(call);
        call_fail_with(call, failure);
    }
    job_free(job);
}

void job_started(struct job *job)
{
    job->state = JOB_RUNNING;
    if (!job->timed_out) { /* else its time was over before its exec, and counts from the launch */
        job->started_us = now_us();
        if (job->timeout_us)
            job->deadline_us = job->started_us + job->timeout_us;
    }
    job_pump(job);
}

void job_ended(struct job *job, int status)
{
    job->status = status;
    job->state = JOB_ENDED;
    job->ended_us = now_us();
    job->deadline_us = 0;
    stream_drain(&job->out[0]);
    stream_drain(&job->out[1]);
    stdin_close(job);
    if (status != 0 && !job->timed_out)
        job->disk_full = disk_is_full();
    if (cgroup_release_empty(job->cgroup))
        job->cgroup = NO_CGROUP;
    job_pump(job);
    jobs_trim();
}

void job_kill(struct job *job)
{
    job->killed = true;
    if (job->session) {
        session_interrupt(job);
    } else if (job->cgroup >= 0) {
        cgroup_kill(job->cgroup);
    } else if (job->state != JOB_ENDED && job->pid > 0) {
        tree_kill(job->pid);
    }
}

ssize_t ctl_receive(int fd, uint8_t *report, int *passed_fd)
{
    struct iovec part = { report, REPORT_MAX };
    union {
        struct cmsghdr align;
        char room[CMSG_SPACE(sizeof(int))];
    } control;
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1,
        .msg_control = control.room, .msg_controllen = sizeof control.room,
    };
    *passed_fd = -1;
    ssize_t n = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    /* Reported before what is queued, when the child ended without reading all we sent it. */
    if (n < 0 && errno == ECONNRESET)
        n = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n < 0)
        return errno == EAGAIN || errno == EINTR ? -1 : 0;
    struct cmsghdr *c = CMSG_FIRSTHDR(&message);
    if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
        memcpy(passed_fd, CMSG_DATA(c), sizeof *passed_fd);
    return n;
}

void failure_of_report(const uint8_t *report, size_t n, struct failure *failure)
{
    struct report parsed = { .code = INTERNAL };
    memcpy(&parsed, report, n < sizeof parsed ? n : sizeof parsed);
    parsed.message[sizeof parsed.message - 1] = 0;
    *failure = (struct failure){
        .code = code_names[parsed.code < CODES ? parsed.code : INTERNAL],
        .reason = parsed.disk_full ? "disk_full" : NULL,
    };
    memcpy(failure->message, parsed.message, sizeof failure->message);
}

static void adopt_terminal(struct job *job, int master)
{
    fcntl(master, F_SETFL, O_RDWR | O_NONBLOCK);
    int writer = fcntl(master, F_DUPFD_CLOEXEC, 0);
    if (!stream_listen(&job->out[0], master))
        close(master);
    if (writer >= 0)
        stdin_open(job, writer, (struct mp_bytes){ 0 });
}

/* False: the job failed to start and is gone. */
static bool read_ctl(struct job *job)
{
    int passed;
    while (job->ctl.fd >= 0) {
        ssize_t n = ctl_receive(job->ctl.fd, scratch, &passed);
        if (n < 0)
            return true;
        if (n > 0 && scratch[0] == REPORT_PTY && passed >= 0 && job->out[0].in.fd < 0) {
            adopt_terminal(job, passed);
            continue;
        }
        if (passed >= 0)
            close(passed);
        if (n > 0 && scratch[0] == REPORT_FAILED) {
            struct failure failure;
            failure_of_report(scratch, (size_t)n, &failure);
            job_fail(job, &failure);
            return false;
        }
        if (n > 0)
            continue;
        source_close(&job->ctl); /* the exec closed it */
        job_started(job);
    }
    return true;
}

static void ctl_ready(struct source *source, uint32_t events)
{
    (void)events;
    read_ctl(owner_of(source, struct job, ctl));
}

bool pipe_make(int *ours, int *theirs, bool we_read)
{
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) < 0)
        return false;
    *ours = ends[we_read ? 0 : 1];
    *theirs = ends[we_read ? 1 : 0];
    fcntl(*ours, F_SETFL, O_NONBLOCK);
    return true;
}

struct plumbing {
    int out, err, in, ctl; /* ours */
    struct child_fds child;
};

static void close_all(const int *fds, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (fds[i] >= 0)
            close(fds[i]);
}

static bool plumb(struct plumbing *p, const struct exec_args *args)
{
    int pair[2];
    *p = (struct plumbing){ -1, -1, -1, -1, { -1, -1, -1, -1, -1, -1, false } };
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
        return false;
    p->ctl = pair[0];
    p->child.ctl = pair[1];
    if (args->pty)
        return true;
    if ((args->want_stdin || args->input.p) && !pipe_make(&p->in, &p->child.in, false))
        return false;
    return pipe_make(&p->out, &p->child.out, true) && pipe_make(&p->err, &p->child.err, true);
}

static void unplumb(struct plumbing *p)
{
    int ours[] = { p->out, p->err, p->in, p->ctl };
    int theirs[] = { p->child.in, p->child.out, p->child.err, p->child.ctl };
    close_all(ours, 4);
    close_all(theirs, 4);
}

static bool exhausted(struct failure *failure, const char *what, int err)
{
    *failure = (struct failure){ .code = "exhausted" };
    snprintf(failure->message, sizeof failure->message, "%s: %s", what, strerror(err));
    return false;
}

bool job_launch(struct job *job, const struct exec_args *args, struct failure *failure)
{
    struct plumbing p;
    job->cgroup = cgroup_acquire();
    if (job->cgroup == CGROUP_FULL)
        return exhausted(failure, "no cgroup left for the command", ENOSPC);
    if (!plumb(&p, args)) {
        int err = errno;
        unplumb(&p);
        return exhausted(failure, "no descriptor left for the command", err);
    }
    job->started_us = now_us();
    job->deadline_us = job->timeout_us ? job->started_us + job->timeout_us : 0;
    pid_t pid = child_fork(cgroup_fd(job->cgroup));
    if (pid == 0)
        exec_child(args, &p.child);
    if (pid < 0) {
        unplumb(&p);
        return exhausted(failure, "the sandbox cannot start another process", -pid);
    }
    int theirs[] = { p.child.in, p.child.out, p.child.err, p.child.ctl };
    close_all(theirs, 4);
    job->pid = pid;
    bool ok = source_open(&job->ctl, p.ctl, EPOLLIN, ctl_ready);
    if (!args->pty)
        ok = stream_listen(&job->out[0], p.out) && stream_listen(&job->out[1], p.err) && ok;
    if (p.in >= 0)
        ok = stdin_open(job, p.in, args->input) && ok;
    if (!ok) { /* epoll ran out of its quota: the command would never be heard of again */
        job_kill(job);
        return exhausted(failure, "no epoll watch left for the command", ENOSPC);
    }
    return true;
}

bool jobs_reap(pid_t pid, int status)
{
    for (struct job *job = jobs_next(NULL); job; job = jobs_next(job)) {
        if (job->pid != pid || job->session || job->state == JOB_ENDED)
            continue;
        /* Dead, so all it had to say on its control socket is there. */
        if (read_ctl(job))
            job_ended(job, status);
        return true;
    }
    return false;
}

bool jobs_stopped(pid_t pid)
{
    struct failure failure = {
        .code = "unavailable",
        .message = "the command was stopped from inside the sandbox before it could start",
    };
    for (struct job *job = jobs_next(NULL); job; job = jobs_next(job)) {
        if (job->pid != pid || job->session || job->state == JOB_ENDED)
            continue;
        /* If it was stopped after its exec, the closed control socket says so by now. */
        if (read_ctl(job) && job->state == JOB_STARTING) {
            job_kill(job);
            job_fail(job, &failure);
        }
        return true;
    }
    return false;
}

uint64_t jobs_tick(uint64_t now)
{
    uint64_t due = 0;
    for (struct job *job = jobs_next(NULL); job; job = jobs_next(job)) {
        /* A command that root inside stopped before its exec is still starting. */
        if ((job->state != JOB_RUNNING && job->state != JOB_STARTING) || !job->deadline_us)
            continue;
        if (now >= job->deadline_us) {
            job->timed_out = true;
            job->deadline_us = 0;
            job_kill(job);
        } else if (!due || job->deadline_us < due) {
            due = job->deadline_us;
        }
    }
    return due;
}
