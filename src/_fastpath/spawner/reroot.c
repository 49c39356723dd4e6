#include "spawner/reroot.h"

#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include "native/kernel.h"
#include "native/process.h"
#include "spawner/guards.h"
#include "spawner/links.h"
#include "spawner/root.h"

#ifndef OVERLAYFS_SUPER_MAGIC /* include/uapi/linux/magic.h */
#define OVERLAYFS_SUPER_MAGIC 0x794c7630
#endif

/* A clone of the tree of mounts at `path`, where we visit. On the root's own file system there is no
 * mount: a name that the sandbox can change must not choose what is cloned. */
static int clone_tree(const char *path)
{
    struct stat root, found;
    int tree, at = k_openat2(AT_FDCWD, path, O_PATH | O_DIRECTORY, RESOLVE_NO_SYMLINKS);

    if (at < 0)
        return at;
    if (stat("/", &root) < 0 || fstat(at, &found) < 0)
        tree = -errno;
    else if (root.st_dev == found.st_dev)
        tree = -ENOTSUP;
    else
        tree = k_open_tree(at, "", OPEN_TREE_CLONE | AT_RECURSIVE | AT_EMPTY_PATH);
    close(at);
    return tree;
}

/* /proc with its masks and /dev with its terminals and shared memory are the sandbox's own, as PID 1
 * has them: so all of it stays what it was, and nobody needs to enter the PID namespace, where a
 * process of root's would be seen. */
static int carry_over(struct creation *c, int pidfd, bool *first)
{
    struct statfs root;
    int error = host_visit(c->host, pidfd);

    if (error < 0)
        return error;
    int proc = c->fd[FD_PROC] = clone_tree("/proc");
    int dev = c->fd[FD_DEV] = proc < 0 ? proc : clone_tree("/dev");
    error = dev < 0 ? dev : (int)KERNEL(statfs("/", &root));
    *first = error == 0 && root.f_type == OVERLAYFS_SUPER_MAGIC;
    host_return(c->host);
    return error;
}

static int attach_clone(const char *from, int at, const char *to)
{
    int tree = clone_tree(from);
    if (tree < 0)
        return tree;
    int error = k_move_mount(tree, at, to);
    close(tree);
    return error;
}

/* Put `bare` into the place of the root, for every process that has it as its own. */
static int exchange_root(int bare)
{
    int error = k_move_mount(bare, AT_FDCWD, "/");
    if (error < 0)
        return error;
    if (fchdir(bare) < 0)
        return -errno;
    error = attach_clone("/proc", bare, "proc");
    if (error == 0)
        error = attach_clone("/dev", bare, "dev");
    if (error == 0)
        error = (int)KERNEL(syscall(SYS_pivot_root, ".", "."));
    /* What lies on top is the old root now, or the new one where that failed. */
    if (umount2(".", MNT_DETACH) < 0 && error == 0)
        error = -errno;
    return error;
}

/* PID 1 needs no root but for its /proc and /dev, and that of the creation would live on in its mount
 * namespace, with all that is cached of it: so at the first re-rooting it gets the spawner's small one.
 * Nobody but PID 1 can tell, and the root of its commands is another matter. */
static int bare_root(struct creation *c, int pidfd, bool first)
{
    if (!first)
        return 0;
    int bare = k_open_tree(AT_FDCWD, "/", OPEN_TREE_CLONE);
    if (bare < 0)
        return bare;
    int error = host_visit(c->host, pidfd);
    if (error == 0)
        error = exchange_root(bare);
    host_return(c->host);
    close(bare);
    return error;
}

/* --- the child ------------------------------------------------------------------------------------ */

static int run_child_steps(struct creation *c)
{
    struct steps *s = &c->steps;
    STEP(s, "root", attach_root(c));
    STEP(s, "proc", attach_at(c, c->fd[FD_PROC], "/proc"));
    STEP(s, "dev", attach_at(c, c->fd[FD_DEV], "/dev"));
    STEP(s, "binds", attach_binds(c));
    STEP(s, "guards", attach_guards(c));
    /* From here on as in a creation's helper: the copy of the namespace locks every mount in it. */
    STEP(s, "userns", (int)KERNEL(setns(c->fd[FD_USERNS], CLONE_NEWUSER)));
    STEP(s, "unshare", (int)KERNEL(unshare(CLONE_NEWNS)));
    STEP(s, "namespace", open_namespaces(c, 1));
    return 0;
}

static int run_child(void *argument)
{
    struct creation *c = argument;
    c->child_error = run_child_steps(c);
    return 0;
}

/* On our descriptors too, for the one that it leaves. It stays in our PID namespace and in our cgroups:
 * the sandbox has no name for it. */
static int start_child(struct creation *c)
{
    struct spawn spawn = {
        .flags = CLONE_VFORK | CLONE_FILES | CLONE_NEWNS | CLONE_PIDFD,
        .exit_signal = SIGCHLD, /* ignored here, so the kernel reaps it */
        .pidfd = &c->pidfd,
        .stack = c->host->stack,
        .run = run_child,
        .argument = c,
    };
    host_return(c->host);
    pid_t pid = spawn_child(&spawn);
    if (pid < 0) {
        c->pidfd = -1;
        return pid;
    }
    if (c->child_error < 0)
        await_death(c->pidfd); /* its mounts hold the upper */
    close_if(&c->pidfd);
    return c->child_error;
}

static int run_steps(struct creation *c, const int *fds)
{
    struct steps *s = &c->steps;
    bool first = false;
    STEP(s, "carry_over", carry_over(c, fds[0], &first));
    STEP(s, "bare_root", bare_root(c, fds[0], first));
    STEP(s, "upper", make_upper(c));
    STEP(s, "upper_dirs", fill_upper(c));
    STEP(s, "files", make_files(c));
    STEP(s, "lowers", map_lowers(c, fds + FDS_GIVEN));
    STEP(s, "overlay", make_overlay(c));
    STEP(s, "links", keep_links(c));
    STEP(s, "bind_sources", clone_binds(c));
    STEP(s, "clone", start_child(c));
    return 0;
}

int reroot_container(struct creation *c, struct host *host,
                     const struct container_plan *plan, const int *fds)
{
    start_creation(c, host, plan);
    c->fd[FD_USERNS] = fds[1];
    int error = run_steps(c, fds);
    host_return(host);
    if (error < 0) {
        close_if(&c->fd[FD_NS_MNT]); /* first: its mounts hold the upper */
        undo_root(c);
        return error;
    }
    enter_step(&c->steps, "");
    int upper = c->fd[FD_UPPER];
    c->fd[FD_UPPER] = -1;
    close_root(c);
    c->fd[FD_UPPER] = upper;
    return 0;
}
