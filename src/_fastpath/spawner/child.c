/* The new process from its first instruction to PID 1. It runs as real root on the spawner's memory,
 * with descriptors and mounts of its own; the parent waits. Only plain system calls here. */
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "native/kernel.h"
#include "native/mounts.h"
#include "native/process.h"
#include "spawner/guards.h"
#include "spawner/root.h"

#define PARKED 64 /* descriptors wait from here on while 0..14 are dealt out */
#define OOM_SCORE "-900"

/* Belongs to the new PID namespace, and to the host's user namespace: real root mounts it. */
static int attach_proc(struct creation *c)
{
    static const struct mount_option options[] = { { "hidepid", "invisible" } };
    const char *step;
    int proc = make_mount("proc", "proc", options, 1,
                          MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC, &step);
    if (proc < 0)
        return proc;
    int error = attach_at(c, proc, "/proc");
    close(proc);
    return error;
}

static int attach_dev(struct creation *c)
{
    /* Not kept in `c`: the parent would take the number for a descriptor of its own. */
    int dev = c->fd[FD_DEV] >= 0 ? c->fd[FD_DEV]
                                 : k_open_tree(AT_FDCWD, "dev", OPEN_TREE_CLONE);
    if (dev < 0)
        return dev;
    int error = attach_at(c, dev, "/dev");
    if (error >= 0)
        error = k_move_mount(c->fd[FD_PTS], dev, "pts");
    if (error >= 0)
        error = k_move_mount(c->fd[FD_SHM], dev, "shm");
    return error;
}

static int lock_read_only(struct creation *c)
{
    for (uint32_t i = 0; i < c->plan->read_only_count; i++) {
        const char *path = c->plan->read_only[i];
        if (mount(path, path, NULL, MS_BIND, NULL) < 0) {
            if (errno == ENOENT)
                continue;
            return -errno;
        }
        int error = k_mount_setattr(AT_FDCWD, path, 0, MOUNT_ATTR_RDONLY, -1);
        if (error < 0)
            return error;
    }
    return 0;
}

/* An empty file or directory of the read-only template; its clone is read-only too. */
static int mask(struct creation *c)
{
    for (uint32_t i = 0; i < c->plan->masked_count; i++) {
        const char *path = c->plan->masked[i];
        if (mount("file", path, NULL, MS_BIND, NULL) == 0 || errno == ENOENT)
            continue;
        if (errno != ENOTDIR || mount("dir", path, NULL, MS_BIND, NULL) < 0)
            return -errno;
    }
    return 0;
}

/* --- the inner namespaces ----------------------------------------------------------------------- */

static int enter_inner(struct creation *c)
{
    struct steps *s = &c->steps;
    STEP(s, "userns", (int)KERNEL(setns(c->fd[FD_USERNS], CLONE_NEWUSER)));
    STEP(s, "unshare", (int)KERNEL(unshare(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS)));
    STEP(s, "hostname", (int)KERNEL(sethostname(c->plan->hostname, strlen(c->plan->hostname))));
    STEP(s, "namespaces", open_namespaces(c, 3));
    return 0;
}

/* Runs in a helper of its own, because who enters a user namespace never leaves it: PID 1 must not
 * belong to the namespace whose root it guards against. The helper shares our descriptors. */
static int run_helper(void *argument)
{
    struct creation *c = argument;
    c->child_error = enter_inner(c);
    return 0;
}

static int make_inner(struct creation *c)
{
    struct spawn spawn = {
        .flags = CLONE_VFORK | CLONE_FILES,
        .exit_signal = SIGCHLD, /* ignored here, so the kernel reaps it */
        .stack = c->host->helper_stack,
        .run = run_helper,
        .argument = c,
    };
    pid_t pid = spawn_child(&spawn);
    return pid < 0 ? pid : c->child_error;
}

/* --- becoming PID 1 ------------------------------------------------------------------------------ */

static int set_affinity(struct creation *c)
{
    if (!c->plan->cpu_count)
        return 0;
    return (int)KERNEL(
        syscall(SYS_sched_setaffinity, 0, sizeof c->plan->cpus, &c->plan->cpus));
}

static int protect_from_oom(struct creation *c)
{
    if (!c->host->may_lower_oom)
        return 0;
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    int error = write(fd, OOM_SCORE, sizeof OOM_SCORE - 1) < 0 ? -errno : 0;
    close(fd);
    return error;
}

static int reset_signals(void)
{
    static const int ignored[] = { SIGCHLD, SIGPIPE, SIGINT, SIGTERM };
    struct sigaction action = { .sa_handler = SIG_DFL };
    sigset_t none;

    for (unsigned i = 0; i < sizeof ignored / sizeof *ignored; i++)
        if (sigaction(ignored[i], &action, NULL) < 0)
            return -errno;
    sigemptyset(&none);
    return (int)KERNEL(sigprocmask(SIG_SETMASK, &none, NULL));
}

/* Raw calls: the wrappers of the C library act on all threads of what it takes for one process. */
static int drop_root(struct creation *c)
{
    /* A core dump may start a program of the host, chosen by kernel.core_pattern. */
    struct rlimit core = { 0, 0 };
    uid_t uid = c->plan->owner_uid;

    umask(022);
    /* A process group of its own, but no session: the spawner's has no terminal, and each session
     * costs a scheduler group (autogroup). Commands that need one make it. */
    if (setrlimit(RLIMIT_CORE, &core) < 0 || setpgid(0, 0) < 0)
        return -errno;
    if (syscall(SYS_setgroups, 0, NULL) < 0 || syscall(SYS_setresgid, uid, uid, uid) < 0 ||
        syscall(SYS_setresuid, uid, uid, uid) < 0)
        return -errno;
    return reset_signals();
}

/* 0..2 /dev/null, 3..13 as docs/protocol.md says, 14 the executable (closed by the exec). */
static int deal_out_fds(struct creation *c)
{
    const int wanted[] = {
        c->host->null,      c->host->null,     c->host->null,     c->fd[FD_LISTENER],
        c->fd[FD_CONFIG],   c->fd[FD_SPOOL],   c->fd[FD_CGROUP],  c->fd[FD_USERNS],
        c->fd[FD_NS_MNT],   c->fd[FD_NS_IPC],  c->fd[FD_NS_UTS],  -1,
        c->fd[FD_UPPER],    c->host->shell,    c->host->init,
    };
    enum { COUNT = sizeof wanted / sizeof *wanted };
    int parked[COUNT];

    for (int i = 0; i < COUNT; i++) {
        parked[i] = wanted[i] < 0 ? -1 : k_dup_from(wanted[i], PARKED);
        if (wanted[i] >= 0 && parked[i] < 0)
            return parked[i];
    }
    for (int i = 0; i < COUNT; i++) {
        if (parked[i] < 0)
            close(i);
        else if (dup3(parked[i], i, i == COUNT - 1 ? O_CLOEXEC : 0) < 0)
            return -errno;
    }
    return k_close_range(COUNT, ~0u, 0);
}

static int execute(void)
{
    static char *const arguments[] = { "dsec-init", NULL };
    static char *const environment[] = { NULL };
    return (int)KERNEL(
        syscall(SYS_execveat, 14, "", arguments, environment, AT_EMPTY_PATH));
}

static int run_child_steps(struct creation *c)
{
    struct steps *s = &c->steps;
    STEP(s, "root", attach_root(c));
    STEP(s, "proc", attach_proc(c));
    STEP(s, "dev", attach_dev(c));
    STEP(s, "read_only", lock_read_only(c));
    STEP(s, "masks", mask(c));
    STEP(s, "binds", attach_binds(c));
    STEP(s, "guards", attach_guards(c));
    STEP(s, "netns", (int)KERNEL(setns(c->fd[FD_NETNS], CLONE_NEWNET)));
    /* The host's, so that root inside has no right over it: it cannot mount a cgroup hierarchy. */
    STEP(s, "cgroup_ns", (int)KERNEL(unshare(CLONE_NEWCGROUP)));
    STEP(s, "helper", make_inner(c));
    STEP(s, "affinity", set_affinity(c));
    STEP(s, "oom_score", protect_from_oom(c));
    STEP(s, "descriptors", deal_out_fds(c));
    STEP(s, "credentials", drop_root(c));
    STEP(s, "exec", execute());
    return 0;
}

int run_container_child(void *argument)
{
    struct creation *c = argument;
    int error = run_child_steps(c);
    c->child_error = error < 0 ? error : -EIO; /* reached only when the exec did not happen */
    return 1;
}
