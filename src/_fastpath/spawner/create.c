#include "spawner/create.h"

#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "native/kernel.h"
#include "native/mounts.h"
#include "native/process.h"
#include "native/tree.h"
#include "spawner/links.h"
#include "spawner/root.h"

#ifndef CLONE_INTO_CGROUP
#define CLONE_INTO_CGROUP 0x200000000ULL
#endif

#define AGENT_BACKLOG 16
#define PIPE_ROOM (60u << 10)       /* bytes that a pipe takes without a reader */
#define DEATH_TIMEOUT_MS 10000
#define TERMINALS_MAX "1024"

static int write_limits(struct creation *c)
{
    for (uint32_t i = 0; i < c->plan->write_count; i++) {
        int error = host_write(c->host, c->plan->writes[i].path, c->plan->writes[i].value);
        if (error < 0)
            return error;
    }
    return 0;
}

/* The owner may make groups below and put its processes there, no more: limits and cgroup.kill stay
 * root's, and it enables no controller (cgroup v2, "Delegation"). */
static int delegate(const struct creation *c, int group)
{
    uid_t owner = c->plan->owner_uid;
    if (fchownat(group, "cgroup.procs", owner, owner, 0) < 0 || fchown(group, owner, owner) < 0)
        return -errno;
    return 0;
}

static int make_cgroup(struct creation *c)
{
    if (!*c->plan->cgroup)
        return 0;
    int fd = c->fd[FD_CGROUP] = make_directory(c, c->plan->cgroup, 0755, false, &c->made_cgroup);
    return fd < 0 ? fd : delegate(c, fd);
}

static int make_runtime(struct creation *c)
{
    return c->fd[FD_RUNTIME] =
               make_directory(c, c->plan->runtime_dir, 0700, false, &c->made_runtime);
}

/* Bound by a relative name: a path may be longer than the 108 bytes of sun_path. */
static int make_listener(struct creation *c)
{
    static const struct sockaddr_un address = { .sun_family = AF_UNIX, .sun_path = "agent.sock" };

    int fd = c->fd[FD_LISTENER] = (int)KERNEL(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (fd < 0)
        return fd;
    if (fchdir(c->fd[FD_RUNTIME]) < 0)
        return -errno;
    int error = 0;
    if (bind(fd, (const struct sockaddr *)&address, sizeof address) < 0 ||
        listen(fd, AGENT_BACKLOG) < 0)
        error = -errno;
    if (chdir("/") < 0 && !error)
        error = -errno;
    return error;
}

static int open_spool(struct creation *c)
{
    return c->fd[FD_SPOOL] = host_open(c->host, c->plan->spool_dir, O_PATH | O_DIRECTORY | O_CLOEXEC);
}

static int fill_upper_and_shm(struct creation *c)
{
    int error = fill_upper(c);
    return error < 0 ? error : make_shm(c);
}

static int mount_terminals(const struct mount_option *options, int count)
{
    const char *step;
    return make_mount("devpts", "none", options, count, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC, &step);
}

static int make_terminals(struct creation *c)
{
    char group[32];
    struct mount_option options[] = { { "ptmxmode", "0666" }, { "max", TERMINALS_MAX },
                                      { "mode", "0620" }, { "gid", group } };

    host_return(c->host); /* what is made in the host's mount namespace may use up its reserve */
    snprintf(group, sizeof group, "%u", c->plan->uid_base + 5); /* tty, in every distribution */
    int fd = mount_terminals(options, 4);
    if (fd == -EINVAL && c->plan->uid_base > INT_MAX - 5) { /* Linux 6.12 reads no larger number */
        options[2].value = "0600";
        fd = mount_terminals(options, 3);
    }
    return c->fd[FD_PTS] = fd;
}

static int hand_over_config(struct creation *c)
{
    const struct mp_bytes *config = &c->plan->init_config;
    int fd, pipes[2];

    if (config->n <= PIPE_ROOM) {
        if (pipe2(pipes, O_CLOEXEC) < 0)
            return -errno;
        fd = pipes[1];
        c->fd[FD_CONFIG] = pipes[0];
    } else {
        fd = c->fd[FD_CONFIG] = (int)KERNEL(memfd_create("config", MFD_CLOEXEC));
        if (fd < 0)
            return fd;
    }
    int error = write(fd, config->p, config->n) == (ssize_t)config->n ? 0 : -EIO;
    if (config->n <= PIPE_ROOM)
        close(fd);
    else if (lseek(fd, 0, SEEK_SET) < 0 && !error)
        error = -errno;
    return error;
}

static int start_child(struct creation *c)
{
    struct spawn spawn = {
        .flags = CLONE_VFORK | CLONE_NEWPID | CLONE_NEWNS | CLONE_PIDFD |
                 (c->fd[FD_CGROUP] >= 0 ? CLONE_INTO_CGROUP : 0),
        .exit_signal = SIGCHLD,
        .cgroup = c->fd[FD_CGROUP],
        .pidfd = &c->pidfd,
        .stack = c->host->stack,
        .run = run_container_child,
        .argument = c,
    };
    host_return(c->host);
    c->child_error = 0;
    pid_t pid = spawn_child(&spawn);
    if (pid < 0) {
        c->pidfd = -1;
        return pid;
    }
    c->pid = pid;
    if (c->child_error == 0)
        return 0;
    await_death(c->pidfd); /* so that its cgroup is empty when the caller hears of the failure */
    close_if(&c->pidfd);
    return c->child_error;
}

static int run_steps(struct creation *c, const int *fds)
{
    struct steps *s = &c->steps;
    STEP(s, "cgroup", make_cgroup(c));
    STEP(s, "limits", write_limits(c));
    STEP(s, "runtime_dir", make_runtime(c));
    STEP(s, "agent_socket", make_listener(c));
    STEP(s, "spool_dir", open_spool(c));
    STEP(s, "upper", make_upper(c));
    STEP(s, "upper_dirs", fill_upper_and_shm(c));
    STEP(s, "files", make_files(c));
    STEP(s, "lowers", map_lowers(c, fds + FDS_GIVEN));
    STEP(s, "overlay", make_overlay(c));
    STEP(s, "links", keep_links(c));
    STEP(s, "terminals", make_terminals(c));
    STEP(s, "bind_sources", clone_binds(c));
    STEP(s, "config", hand_over_config(c));
    STEP(s, "clone", start_child(c));
    return 0;
}

static void close_all(struct creation *c)
{
    close_root(c);
    for (int i = FD_CGROUP; i <= FD_CONFIG; i++) /* given ones are the caller's, FD_NS_* the child's */
        close_if(&c->fd[i]);
}

/* A child that failed is dead, but may count for a moment longer. */
static void remove_group(struct creation *c)
{
    const char *name;
    int parent = host_parent(c->host, c->plan->cgroup, &name);
    if (parent < 0)
        return;
    for (int tries = 0; tries < DEATH_TIMEOUT_MS && remove_cgroup(parent, name) == -EBUSY; tries++)
        poll(NULL, 0, 1);
    close(parent);
}

static void undo(struct creation *c)
{
    undo_root(c);
    close_all(c);
    if (c->made_runtime)
        host_remove(c->host, c->plan->runtime_dir);
    if (c->made_cgroup)
        remove_group(c);
}

int create_container(struct creation *c, struct host *host,
                     const struct container_plan *plan, const int *fds)
{
    start_creation(c, host, plan);
    c->fd[FD_USERNS] = fds[0];
    c->fd[FD_NETNS] = fds[1];

    int error = run_steps(c, fds);
    host_return(c->host);
    if (error < 0) {
        undo(c);
        return error;
    }
    enter_step(&c->steps, "");
    close_all(c);
    return 0;
}
