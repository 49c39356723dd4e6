#include "child.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <termios.h>
#include <unistd.h>

#include "config.h"
#include "confine.h"
#include "conn.h"
#include "process.h"

#ifndef TIOCGPTPEER
#define TIOCGPTPEER _IO('T', 0x41)
#endif

#define INTO_CGROUP 0x200000000ULL /* CLONE_INTO_CGROUP; absent from musl's headers */

const char *const code_names[CODES] = {
    "invalid_argument", "not_found", "already_exists", "wrong_state",
    "permission_denied", "unsupported", "exhausted", "internal",
};

static int ctl_fd = -1; /* of this child */

pid_t child_fork(int cgroup_fd)
{
    /* struct clone_args: flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls,
     * set_tid, set_tid_size, cgroup. A plain fork otherwise: a vfork-style child that root inside
     * stops would stop init with it. */
    uint64_t args[11] = { 0 };
    if (cgroup_fd >= 0) {
        args[0] = INTO_CGROUP;
        args[10] = (uint64_t)cgroup_fd;
    }
    args[4] = SIGCHLD;
    oom_score_raise(true);
    long pid = syscall(SYS_clone3, args, sizeof args);
    if (pid == 0)
        return 0;
    int err = errno;
    oom_score_raise(false);
    return pid < 0 ? -err : (pid_t)pid;
}

bool child_send(enum report_kind kind, const void *data, size_t n, int fd)
{
    uint8_t head = (uint8_t)kind;
    struct iovec parts[2] = { { &head, 1 }, { (void *)(uintptr_t)data, n } };
    struct msghdr message = { .msg_iov = parts, .msg_iovlen = 2 };
    union {
        struct cmsghdr align;
        char room[CMSG_SPACE(sizeof(int))];
    } control;
    if (fd >= 0) {
        memset(&control, 0, sizeof control);
        message.msg_control = control.room;
        message.msg_controllen = sizeof control.room;
        struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(c), &fd, sizeof fd);
    }
    ssize_t sent;
    do
        sent = sendmsg(ctl_fd, &message, MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent >= 0;
}

static _Noreturn void fail_report(struct report *report)
{
    report->kind = REPORT_FAILED;
    report->length = (uint8_t)strnlen(report->message, sizeof report->message - 1);
    child_send(REPORT_FAILED, &report->code, sizeof *report - 1, -1);
    _exit(127);
}

_Noreturn void child_fail(enum code code, const char *format, ...)
{
    struct report report = { .code = (uint8_t)code };
    va_list args;
    va_start(args, format);
    vsnprintf(report.message, sizeof report.message, format, args);
    va_end(args);
    fail_report(&report);
}

static enum code code_of_errno(int err)
{
    switch (err) {
    case ENOENT: return NOT_FOUND;
    case EEXIST: return ALREADY_EXISTS;
    case EACCES: case EPERM: case EROFS: return PERMISSION_DENIED;
    case ENOTDIR: case EISDIR: case EINVAL: case ELOOP: case ENAMETOOLONG: case EXDEV: case ENXIO:
    case ESPIPE: case E2BIG: case ENOEXEC: case EOVERFLOW: return INVALID_ARGUMENT;
    case ENOTEMPTY: case EBUSY: case ETXTBSY: return WRONG_STATE;
    case EOPNOTSUPP: case ENOSYS: case ENODEV: return UNSUPPORTED;
    case ENOSPC: case EDQUOT: case ENOMEM: case EAGAIN: case EMFILE: case ENFILE: case EMLINK:
    case EFBIG: return EXHAUSTED;
    default: return INTERNAL;
    }
}

_Noreturn void child_fail_errno(int err, const char *what, struct mp_bytes path)
{
    struct report report = { .code = (uint8_t)code_of_errno(err) };
    const char *shown = path.p ? (const char *)path.p : "";
    int n = path.n > 120 ? 120 : (int)path.n;
    const char *more = path.n > 120 ? "..." : "";
    report.disk_full = err == ENOSPC || err == EDQUOT;
    const char *text = report.disk_full ? "disk full" : strerror(err);
    snprintf(report.message, sizeof report.message, "%s%s%.*s%s: %s", what, path.p ? " " : "", n,
             shown, more, text);
    fail_report(&report);
}

_Noreturn void child_result(const void *raw, size_t n)
{
    child_send(REPORT_RESULT, raw, n, -1);
    _exit(0);
}

static void enter_namespaces(void)
{
    static const struct {
        int fd, kind;
        const char *name;
    } order[] = {
        /* The user namespace first: it gives the rights over the others. */
        { FD_USERNS, CLONE_NEWUSER, "user" }, { FD_MNTNS, CLONE_NEWNS, "mount" },
        { FD_IPCNS, CLONE_NEWIPC, "ipc" },    { FD_UTSNS, CLONE_NEWUTS, "uts" },
        { FD_CGROUPNS, 0x02000000, "cgroup" },
    };
    for (size_t i = 0; i < sizeof order / sizeof *order; i++)
        if (namespace_given[i] && setns(order[i].fd, order[i].kind) < 0)
            child_fail(INTERNAL, "cannot enter the sandbox's %s namespace: %s", order[i].name,
                       strerror(errno));
}

struct sock_fprog_layout {
    unsigned short len;
    void *filter;
};

/* Both need privilege, so they come before the identity is given up. */
static void install_bounds(void)
{
    /* Entering a user namespace fills the set, so nothing of it can be dropped in advance. */
    for (int cap = 0; cap < 64; cap++)
        if (!(config.caps >> cap & 1) && prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) < 0) {
            if (errno == EINVAL && prctl(PR_CAPBSET_READ, cap, 0, 0, 0) < 0)
                break; /* the kernel knows no higher one */
            child_fail(INTERNAL, "cannot drop capability %d: %s", cap, strerror(errno));
        }
    if (config.no_new_privs && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
        child_fail(INTERNAL, "cannot set no_new_privs: %s", strerror(errno));
    struct sock_fprog_layout filter = {
        .len = (unsigned short)(config.seccomp.n / 8),
        .filter = (void *)(uintptr_t)config.seccomp.p,
    };
    if (filter.len && prctl(PR_SET_SECCOMP, 2 /* SECCOMP_MODE_FILTER */, &filter, 0, 0) < 0)
        child_fail(INTERNAL, "cannot install the seccomp filter: %s", strerror(errno));
}

static void trim_capabilities(bool root)
{
    struct {
        uint32_t version;
        int pid;
    } head = { 0x20080522, 0 };
    struct {
        uint32_t effective, permitted, inheritable;
    } sets[2];
    if (syscall(SYS_capget, &head, sets) < 0)
        child_fail(INTERNAL, "cannot read capabilities: %s", strerror(errno));
    for (int i = 0; i < 2; i++) {
        uint32_t kept = root ? sets[i].permitted & (uint32_t)(config.caps >> (32 * i)) : 0;
        sets[i].effective = sets[i].permitted = kept;
        sets[i].inheritable = 0;
    }
    if (syscall(SYS_capset, &head, sets) < 0)
        child_fail(INTERNAL, "cannot set capabilities: %s", strerror(errno));
}

static void read_groups(struct mp_bytes raw, struct identity *who)
{
    struct mp_reader r = mp_reader_of(raw.p, raw.n);
    uint32_t n = mp_get_array(&r);
    if (n > sizeof who->groups / sizeof who->groups[0])
        child_fail(INVALID_ARGUMENT, "more than 64 supplementary groups");
    for (uint32_t i = 0; i < n; i++)
        who->groups[i] = (gid_t)mp_get_u64(&r);
    who->n_groups = (int)n;
}

/* A terminal of the sandbox's own devpts: the user's, by the file-system identity, but made before the
 * policy holds, which may close /dev and its ioctls to commands. */
static void open_terminal(const struct role *role, const struct identity *who)
{
    syscall(SYS_setfsgid, who->gid);
    syscall(SYS_setfsuid, who->uid);
    int master = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC);
    int locked = 0;
    if (master < 0)
        child_fail(UNSUPPORTED, "cannot open a terminal in the sandbox: %s", strerror(errno));
    struct winsize size = { .ws_row = role->rows, .ws_col = role->cols };
    int slave = -1;
    if (ioctl(master, TIOCSPTLCK, &locked) == 0)
        slave = ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY);
    if (slave < 0)
        child_fail(UNSUPPORTED, "cannot open the terminal's slave: %s", strerror(errno));
    ioctl(slave, TIOCSWINSZ, &size);
    if (ioctl(slave, TIOCSCTTY, 0) < 0)
        child_fail(UNSUPPORTED, "cannot take the terminal: %s", strerror(errno));
    if (!child_send(REPORT_PTY, NULL, 0, master))
        child_fail(EXHAUSTED, "cannot hand the terminal over: %s", strerror(errno));
    dup2(slave, 0);
    dup2(slave, 1);
    dup2(slave, 2);
    close(slave);
    close(master);
    syscall(SYS_setfsuid, 0);
    syscall(SYS_setfsgid, 0);
}

static void become(const struct role *role, struct identity *who)
{
    struct mp_bytes user = role->user;
    if (!user.p)
        user = config.user.n ? config.user : (struct mp_bytes){ (const uint8_t *)"root", 4 };
    if (!account_find(user, who))
        child_fail(NOT_FOUND, "no such user in the sandbox: %.*s", (int)user.n, user.p);
    if (role->groups.p)
        read_groups(role->groups, who);
    if (role->pty)
        open_terminal(role, who);
    if (role->command)
        confine_files();
    install_bounds();
    /* Not through the C library, which would first look for threads to change as well. */
    if (syscall(SYS_setgroups, (size_t)who->n_groups, who->groups) < 0 ||
        syscall(SYS_setresgid, who->gid, who->gid, who->gid) < 0 ||
        syscall(SYS_setresuid, who->uid, who->uid, who->uid) < 0)
        child_fail(errno == EINVAL ? INVALID_ARGUMENT : INTERNAL,
                   "cannot become user %.*s (uid %u, gid %u): %s", (int)user.n, user.p, who->uid,
                   who->gid, strerror(errno));
    trim_capabilities(who->uid == 0);
}

/* Move a descriptor out of the range that is filled next; -1 stays. */
static int lift(int fd)
{
    if (fd < 0 || fd > SHELL_FEED_FD)
        return fd;
    int lifted = (int)syscall(SYS_fcntl, fd, F_DUPFD_CLOEXEC, 40); /* musl's makes two calls of it */
    if (lifted < 0)
        child_fail(EXHAUSTED, "no descriptor left: %s", strerror(errno));
    return lifted;
}

static void place(const struct child_fds *fds)
{
    int in = lift(fds->in < 0 ? null_fd : fds->in);
    int out = lift(fds->out < 0 ? null_fd : fds->out);
    int err = lift(fds->err < 0 ? null_fd : fds->err);
    int feed = lift(fds->feed), status = lift(fds->status);
    int ctl = lift(ctl_fd), shell = lift(fds->shell ? FD_SHELL : -1);
    int last = CTL_FD;
    apparmor_fd = lift(apparmor_fd);
    if (dup2(in, 0) < 0 || dup2(out, 1) < 0 || dup2(err, 2) < 0 ||
        dup3(ctl, CTL_FD, O_CLOEXEC) < 0)
        child_fail(INTERNAL, "cannot place descriptors: %s", strerror(errno));
    ctl_fd = CTL_FD;
    if (shell >= 0 && (last = dup3(shell, SHELL_FD, O_CLOEXEC)) < 0)
        child_fail(INTERNAL, "cannot place descriptors: %s", strerror(errno));
    if (apparmor_fd >= 0 && (last = apparmor_fd = dup3(apparmor_fd, last + 1, O_CLOEXEC)) < 0)
        child_fail(INTERNAL, "cannot place descriptors: %s", strerror(errno));
    if (feed >= 0 && (dup2(feed, SHELL_FEED_FD) < 0 || dup2(status, SHELL_STATUS_FD) < 0))
        child_fail(INTERNAL, "cannot place descriptors: %s", strerror(errno));
    /* What stays open is a way out of the sandbox: directories of the host, namespaces. */
    if (syscall(SYS_close_range, last + 1, feed >= 0 ? SHELL_STATUS_FD - 1 : ~0U, 0) < 0 ||
        (feed >= 0 && syscall(SYS_close_range, SHELL_FEED_FD + 1, ~0U, 0) < 0))
        child_fail(INTERNAL, "cannot close descriptors: %s", strerror(errno));
}

static void reset_signals(void)
{
    struct sigaction standard = { .sa_handler = SIG_DFL };
    sigset_t none;
    sigaction(SIGPIPE, &standard, NULL);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

void child_enter(const struct child_fds *fds, const struct role *role, struct identity *who)
{
    ctl_fd = fds->ctl;
    reset_signals();
    setsid();
    umask(022);
    if (role->command)
        apparmor_open(fds->shell);
    enter_namespaces();
    if (config.nofile) {
        struct rlimit limit;
        getrlimit(RLIMIT_NOFILE, &limit);
        rlim_t wanted = config.nofile < limit.rlim_max ? config.nofile : limit.rlim_max;
        limit.rlim_cur = limit.rlim_max = wanted;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
    /* Before the sandbox's files are looked at: /etc/passwd may be a link to /proc/self/fd/N/.. */
    place(fds);
    become(role, who);
}

void child_stay(const struct child_fds *fds, int first, int second)
{
    ctl_fd = fds->ctl;
    reset_signals();
    setsid();
    int out = lift(fds->out), ctl = lift(ctl_fd);
    first = lift(first);
    second = lift(second);
    if (dup2(null_fd, 0) < 0 || dup2(out, 1) < 0 || dup2(null_fd, 2) < 0 ||
        dup3(ctl, CTL_FD, O_CLOEXEC) < 0 || dup3(first, CTL_FD + 1, O_CLOEXEC) < 0 ||
        dup3(second, CTL_FD + 2, O_CLOEXEC) < 0)
        child_fail(INTERNAL, "cannot place descriptors: %s", strerror(errno));
    ctl_fd = CTL_FD;
    if (syscall(SYS_close_range, CTL_FD + 3, ~0U, 0) < 0)
        child_fail(INTERNAL, "cannot close descriptors: %s", strerror(errno));
}
