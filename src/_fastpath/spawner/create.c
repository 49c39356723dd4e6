#include "spawner/create.h"

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
#include "native/quota.h"
#include "native/tree.h"

#ifndef CLONE_INTO_CGROUP
#define CLONE_INTO_CGROUP 0x200000000ULL
#endif

#define AGENT_BACKLOG 16
#define PIPE_ROOM (60u << 10)       /* bytes that a pipe takes without a reader */
#define INODE_BYTES 4096            /* of upper per inode that a memory upper may hold */
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

/* Make the directory `path` of the host and open it. `made` tells the undo. */
static int make_directory(struct creation *c, const char *path, mode_t mode, bool may_exist,
                          bool *made)
{
    const char *name;
    int parent = host_parent(c->host, path, &name);
    if (parent < 0)
        return parent;
    int fd = (int)KERNEL(mkdirat(parent, name, mode));
    *made = fd == 0;
    if (fd == 0 || (fd == -EEXIST && may_exist))
        fd = (int)KERNEL(
            openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    close(parent);
    return fd;
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

/* Its own file system: a shared one would need a quota that tmpfs lacks before 6.6. */
static int make_memory_upper(struct creation *c)
{
    char size[32], inodes[32];
    const char *step;
    uint64_t count = c->plan->upper_bytes / INODE_BYTES;

    snprintf(size, sizeof size, "%llu", (unsigned long long)c->plan->upper_bytes);
    snprintf(inodes, sizeof inodes, "%llu", (unsigned long long)(count < 16384 ? 16384 : count));
    struct mount_option options[] = { { "mode", "0700" }, { "size", size }, { "nr_inodes", inodes } };
    return make_mount("tmpfs", "none", options, 3, MOUNT_ATTR_NODEV, &step);
}

static int make_disk_upper(struct creation *c)
{
    int fd = make_directory(c, c->plan->upper_dir, 0700, true, &c->made_upper_dir);
    if (fd < 0)
        return fd;
    int result = 0;
    if (c->plan->upper_project)
        result = set_project(fd, c->plan->upper_project);
    if (result == 0)
        result = host_clone_mount(c->host, fd, NULL);
    close(fd);
    return result;
}

static int make_upper(struct creation *c)
{
    return c->fd[FD_UPPER] =
               *c->plan->upper_dir ? make_disk_upper(c) : make_memory_upper(c);
}

static int make_owned(const struct creation *c, const char *name)
{
    int at = c->fd[FD_UPPER];
    if (mkdirat(at, name, 0755) < 0)
        return -errno;
    int fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    if (fchown(fd, c->plan->uid_base, c->plan->uid_base) < 0) {
        int error = -errno;
        close(fd);
        return error;
    }
    return fd;
}

/* One letter each: /proc/mounts inside shows the path of the upper. */
static int fill_upper(struct creation *c)
{
    c->made_upper = true;
    int u = c->fd[FD_LAYER_U] = make_owned(c, "u");
    int w = u < 0 ? u : (c->fd[FD_LAYER_W] = make_owned(c, "w"));
    int s = w < 0 ? w : make_owned(c, "s");
    if (s < 0)
        return s;
    int shm = c->fd[FD_SHM] =
        fchmod(s, 01777) < 0 ? -errno : host_clone_mount(c->host, s, NULL);
    close(s);
    if (shm < 0)
        return shm;
    return k_mount_setattr(shm, "", AT_EMPTY_PATH, MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID, -1);
}

/* The directories above `target` get what /etc has everywhere, root's 0755. */
static int make_parents(const struct creation *c, const char *target)
{
    int at = c->fd[FD_LAYER_U];
    uid_t root = c->plan->uid_base;
    char path[1024];

    for (const char *slash = target; (slash = strchr(slash, '/')); slash++) {
        size_t size = (size_t)(slash - target);
        if (size >= sizeof path)
            return -ENAMETOOLONG;
        memcpy(path, target, size);
        path[size] = 0;
        if (mkdirat(at, path, 0755) == 0 ? fchownat(at, path, root, root, 0) < 0 : errno != EEXIST)
            return -errno;
    }
    return 0;
}

/* A generated file goes into the upper: no mount of its own, and root inside may change it. */
static int make_file(const struct creation *c, const struct new_file *file)
{
    int at = c->fd[FD_LAYER_U], error = 0;
    int fd = k_create_file(at, file->target, file->mode);

    if (fd == -ENOENT) {
        error = make_parents(c, file->target);
        fd = error < 0 ? error : k_create_file(at, file->target, file->mode);
    }
    if (fd < 0)
        return fd;
    if (write(fd, file->content.p, file->content.n) != (ssize_t)file->content.n)
        error = -ENOSPC;
    else if (fchown(fd, c->plan->uid_base, c->plan->uid_base) < 0)
        error = -errno;
    close(fd);
    return error;
}

static int make_files(struct creation *c)
{
    for (uint32_t i = 0; i < c->plan->file_count; i++) {
        int error = make_file(c, &c->plan->files[i]);
        if (error < 0)
            return error;
    }
    return 0;
}

static int map_lowers(struct creation *c, const int *given)
{
    for (uint32_t i = 0; i < c->plan->lowers; i++) {
        int tree = c->lowers[i] = host_clone_mount(c->host, given[i], NULL);
        if (tree < 0)
            return tree;
        int error = k_mount_setattr(tree, "", AT_EMPTY_PATH,
                                    MOUNT_ATTR_IDMAP | MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV,
                                    c->fd[FD_USERNS]);
        if (error < 0)
            return error;
    }
    return 0;
}

/* redirect_dir: without it renaming a directory of a lower is EXDEV. volatile: the upper dies with the
 * sandbox, so fsync needs no disk. */
static int configure_overlay(const struct creation *c, int fs)
{
    int error = k_fsconfig(fs, FSCONFIG_SET_STRING, "source", "none", 0);
    for (uint32_t i = c->plan->lowers; i-- > 0 && error >= 0;) /* topmost first */
        error = k_fsconfig(fs, FSCONFIG_SET_FD, "lowerdir+", NULL, c->lowers[i]);
    if (error >= 0)
        error = k_fsconfig(fs, FSCONFIG_SET_FD, "upperdir", NULL, c->fd[FD_LAYER_U]);
    if (error >= 0)
        error = k_fsconfig(fs, FSCONFIG_SET_FD, "workdir", NULL, c->fd[FD_LAYER_W]);
    if (error >= 0)
        error = k_fsconfig(fs, FSCONFIG_SET_STRING, "redirect_dir", "on", 0);
    if (error >= 0)
        error = k_fsconfig(fs, FSCONFIG_SET_STRING, "uuid", "null", 0);
    if (error >= 0)
        error = k_fsconfig(fs, FSCONFIG_SET_FLAG, "volatile", NULL, 0);
    return error;
}

static int make_overlay(struct creation *c)
{
    int fs = k_fsopen("overlay");
    if (fs < 0)
        return fs;
    int result = configure_overlay(c, fs);
    if (result >= 0)
        result = k_fsconfig(fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0);
    if (result >= 0)
        result = c->fd[FD_OVERLAY] = k_fsmount(fs, MOUNT_ATTR_NODEV);
    close(fs);
    return result;
}

static int make_terminals(struct creation *c)
{
    char group[32];
    const char *step;
    host_return(c->host); /* what is made in the host's mount namespace may use up its reserve */
    snprintf(group, sizeof group, "%u", c->plan->uid_base + 5); /* tty, in every distribution */
    struct mount_option options[] = { { "mode", "0620" }, { "ptmxmode", "0666" }, { "gid", group },
                                      { "max", TERMINALS_MAX } };
    return c->fd[FD_PTS] = make_mount("devpts", "none", options, 4,
                                      MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC, &step);
}

static int clone_binds(struct creation *c)
{
    if (*c->plan->dev_tree) {
        int tree = c->fd[FD_DEV] = host_clone_mount(c->host, -1, c->plan->dev_tree);
        int error = tree < 0 ? tree
                             : k_mount_setattr(tree, "", AT_EMPTY_PATH,
                                               MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID |
                                                   MOUNT_ATTR_NOEXEC, -1);
        if (error < 0)
            return error;
    }
    for (uint32_t i = 0; i < c->plan->bind_count; i++) {
        const struct bind *bind = &c->plan->binds[i];
        int tree = c->binds[i] = host_clone_mount(c->host, -1, bind->source);
        int error = tree < 0 ? tree
                             : k_mount_setattr(tree, "", AT_EMPTY_PATH,
                                               MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID |
                                                   (bind->read_only ? MOUNT_ATTR_RDONLY : 0), -1);
        if (error < 0)
            return error;
    }
    return 0;
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

static int await_death(int pidfd)
{
    struct pollfd entry = { .fd = pidfd, .events = POLLIN };
    int ready;
    do
        ready = poll(&entry, 1, DEATH_TIMEOUT_MS);
    while (ready < 0 && errno == EINTR);
    return ready > 0 ? 0 : -ETIMEDOUT;
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
    STEP(s, "upper_dirs", fill_upper(c));
    STEP(s, "files", make_files(c));
    STEP(s, "lowers", map_lowers(c, fds + FDS_GIVEN));
    STEP(s, "overlay", make_overlay(c));
    STEP(s, "terminals", make_terminals(c));
    STEP(s, "bind_sources", clone_binds(c));
    STEP(s, "config", hand_over_config(c));
    STEP(s, "clone", start_child(c));
    return 0;
}

static void close_all(struct creation *c)
{
    for (int i = FD_CGROUP; i <= FD_CONFIG; i++) /* given ones are the caller's, FD_NS_* the child's */
        close_if(&c->fd[i]);
    for (uint32_t i = 0; i < c->plan->lowers; i++)
        close_if(&c->lowers[i]);
    for (uint32_t i = 0; i < c->plan->bind_count; i++)
        close_if(&c->binds[i]);
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

/* Mounts are detached and go with their descriptors; what has a name is removed. */
static void undo(struct creation *c)
{
    close_if(&c->fd[FD_OVERLAY]); /* first: it holds the upper and the work directory */
    if (c->made_upper && *c->plan->upper_dir)
        for (const char *const *name = (const char *const[]){ "u", "w", "s", NULL }; *name; name++)
            remove_tree(c->fd[FD_UPPER], *name);
    close_all(c);
    if (c->made_upper_dir)
        host_remove(c->host, c->plan->upper_dir);
    if (c->made_runtime)
        host_remove(c->host, c->plan->runtime_dir);
    if (c->made_cgroup)
        remove_group(c);
}

int create_container(struct creation *c, struct host *host,
                     const struct container_plan *plan, const int *fds)
{
    *c = (struct creation){ .host = host, .plan = plan, .pidfd = -1 };
    c->steps.fail = plan->fail_step;
    c->steps.trace = plan->trace;
    for (int i = 0; i < FD_COUNT; i++)
        c->fd[i] = i <= FD_NETNS ? fds[i] : -1;
    memset(c->lowers, -1, sizeof c->lowers);
    memset(c->binds, -1, sizeof c->binds);

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
