#include "root.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "args.h"
#include "config.h"
#include "job.h"
#include "process.h"
#include "session.h"
#include "transfer.h"

#define NS_GET_NSTYPE _IO(0xb7, 3) /* include/uapi/linux/nsfs.h */

static const int places[RX_FDS] = { FD_MNTNS, FD_UPPER };

/* A swap that waits for children whose calls are over: they end by themselves in a moment. */
static struct {
    struct call *call; /* NULL: none */
    int fds[RX_FDS];
    uint64_t until_us;
} waiting;

static pid_t closer; /* takes an old root down; <= 0: nobody */

/* Whose call goes on in the old root, for the message; false: nobody's. */
static bool in_use(char *who, size_t room)
{
    for (struct job *job = jobs_next(NULL); job; job = jobs_next(job))
        if (job->state != JOB_ENDED) {
            snprintf(who, room, "command %s is running", job->cid);
            return true;
        }
    if (sessions_count())
        snprintf(who, room, "%u sessions are open", sessions_count());
    else if (transfers_on_files())
        snprintf(who, room, "%u file operations or watches are running", transfers_on_files());
    else
        return false;
    return true;
}

static bool well_formed(const int *fds)
{
    struct stat upper;
    return ioctl(fds[0], NS_GET_NSTYPE) == CLONE_NEWNS && fstat(fds[1], &upper) == 0 &&
           S_ISDIR(upper.st_mode);
}

static void close_both(const int *fds)
{
    for (int i = 0; i < RX_FDS; i++)
        if (fds[i] >= 0)
            close(fds[i]);
}

/* Put `fds` into their places and leave there what these held; on failure nothing changes. */
static int exchange(int *fds)
{
    int old[RX_FDS], err = 0;
    for (int i = 0; i < RX_FDS; i++) {
        old[i] = (int)syscall(SYS_fcntl, places[i], F_DUPFD_CLOEXEC, FD_FIRST_FREE);
        err = old[i] < 0 ? errno : err;
    }
    for (int i = 0; i < RX_FDS && !err; i++)
        if (dup3(fds[i], places[i], O_CLOEXEC) < 0) {
            err = errno;
            while (i--)
                dup3(old[i], places[i], O_CLOEXEC);
            break;
        }
    close_both(err ? old : fds);
    if (!err)
        memcpy(fds, old, sizeof old);
    return err;
}

/* The last descriptor of a root takes it down, with all that is cached of it: milliseconds for tens of
 * thousands of files. A child that only ends does that; the sandbox cannot reach it. */
static void give_up(const int *fds)
{
    char none;
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) < 0) {
        close_both(fds);
        return;
    }
    closer = child_fork(-1);
    if (closer == 0) {
        close(ends[1]);
        while (read(ends[0], &none, 1) < 0 && errno == EINTR) /* until it is the last holder */
            ;
        _exit(0);
    }
    close_both(fds);
    close(ends[0]);
    close(ends[1]);
}

static void swap(struct call *call, int *fds)
{
    int err = exchange(fds);
    if (err) {
        call_fail(call, "exhausted", "no descriptor left: %s", strerror(err));
        close_both(fds);
        return;
    }
    reply_nil(call);
    give_up(fds);
}

static void refuse(struct call *call, const int *fds, const char *code, const char *why)
{
    call_fail(call, code, "the root cannot be replaced: %s", why);
    close_both(fds);
}

static void cancel(struct call *call)
{
    waiting.call = NULL;
    refuse(call, waiting.fds, "timeout", "the call was cancelled");
}

static void drop(struct call *call)
{
    (void)call;
    waiting.call = NULL;
    close_both(waiting.fds);
}

static const struct call_ops swap_ops = { .cancel = cancel, .drop = drop };

uint64_t root_tick(uint64_t now)
{
    struct call *call = waiting.call;
    char who[MAX_NAME + 64] = "processes live on in the background";
    if (!call)
        return 0;
    bool alone = process_alone(); /* first: it takes note of commands that have ended */
    bool used = in_use(who, sizeof who);
    if (!used && !alone && closer > 0)
        return 0; /* its end wakes us */
    if (!used && !alone && now < waiting.until_us)
        return waiting.until_us;
    waiting.call = NULL;
    if (used || !alone)
        refuse(call, waiting.fds, "wrong_state", who);
    else
        swap(call, waiting.fds);
    return 0;
}

bool root_reap(pid_t pid)
{
    if (pid != closer)
        return false;
    closer = 0;
    return true;
}

void root_swap(struct call *call, struct mp_bytes args)
{
    const char *problem = args_nothing(args);
    int fds[RX_FDS];
    if (problem)
        call_fail(call, "invalid_argument", "%s", problem);
    else if (!conn_take_fds(call->conn, fds, RX_FDS))
        call_fail(call, "invalid_argument", "%d descriptors must come with the call", RX_FDS);
    else if (!namespace_given[FD_MNTNS - FD_USERNS] || !config.has_upper)
        refuse(call, fds, "unsupported", "commands run in the root of dsec-init");
    else if (!well_formed(fds))
        refuse(call, fds, "invalid_argument",
               "its descriptors are not a mount namespace and a directory");
    else if (waiting.call)
        refuse(call, fds, "wrong_state", "it is being replaced");
    else {
        call->ops = &swap_ops;
        waiting.call = call;
        memcpy(waiting.fds, fds, sizeof fds);
        waiting.until_us = now_us() + VACATE_US;
    }
}
