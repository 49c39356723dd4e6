#include "spawner/host.h"

#include <sched.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include "native/kernel.h"
#include "native/mounts.h"
#include "native/namespaces.h"
#include "native/process.h"
#include "native/tree.h"

#define ANCHOR "/dir" /* an empty directory of the small root */

/* --- the small root ---------------------------------------------------------------------------- */

static const struct {
    const char *name;
    unsigned minor;
} DEVICES[] = { { "null", 3 }, { "zero", 5 }, { "full", 7 }, { "random", 8 }, { "urandom", 9 } };

static const struct {
    const char *name, *target;
} LINKS[] = {
    { "fd", "/proc/self/fd" },         { "stdin", "/proc/self/fd/0" },
    { "stdout", "/proc/self/fd/1" },   { "stderr", "/proc/self/fd/2" },
    { "ptmx", "pts/ptmx" },
};

static int make_device(int at, const char *name, unsigned major, unsigned minor)
{
    if (mknodat(at, name, S_IFCHR | 0666, makedev(major, minor)) < 0 ||
        fchmodat(at, name, 0666, 0) < 0)
        return -errno;
    return 0;
}

/* The minimal /dev: what programs take for granted, nothing that reaches hardware. */
static int fill_dev(int dev)
{
    int error = make_device(dev, "tty", 5, 0);
    for (unsigned i = 0; i < sizeof DEVICES / sizeof *DEVICES && !error; i++)
        error = make_device(dev, DEVICES[i].name, 1, DEVICES[i].minor);
    for (unsigned i = 0; i < sizeof LINKS / sizeof *LINKS && !error; i++)
        error = (int)KERNEL(symlinkat(LINKS[i].target, dev, LINKS[i].name));
    if (!error && (mkdirat(dev, "pts", 0755) < 0 || mkdirat(dev, "shm", 0755) < 0))
        error = -errno;
    return error;
}

/* What masks are made of: empty, or closed even to root inside, to whom our root is nobody. */
static int fill_masks(int root)
{
    if (mkdirat(root, "dir", 0555) < 0 || mknodat(root, "file", S_IFREG | 0444, 0) < 0 ||
        mkdirat(root, "closed-dir", 0) < 0 || mknodat(root, "closed-file", S_IFREG, 0) < 0)
        return -errno;
    return 0;
}

static int fill_template(int root)
{
    if (mkdirat(root, "dev", 0755) < 0 || mkdirat(root, "proc", 0555) < 0)
        return -errno;
    int masks = fill_masks(root);
    if (masks < 0)
        return masks;
    int dev = openat(root, "dev", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dev < 0)
        return -errno;
    int error = fill_dev(dev);
    close(dev);
    return error;
}

/* Swap the root for `root` and forget the old one. Where / has no parent mount (a root in the initial
 * RAM disk) pivot_root cannot work: then the small root covers the old one, at the price of copying
 * the host's mounts with every clone. */
static int take_root(int root)
{
    int error = k_move_mount(root, AT_FDCWD, "/");
    if (error < 0)
        return error;
    if (fchdir(root) < 0)
        return -errno;
    if (syscall(SYS_pivot_root, ".", ".") == 0) {
        /* The old root now lies on top of the new one. */
        if (umount2(".", MNT_DETACH) < 0)
            return -errno;
        return (int)KERNEL(chdir("/"));
    }
    return (int)KERNEL(chroot("."));
}

static int make_root(const char **step)
{
    static const struct mount_option options[] = { { "mode", "0755" }, { "size", "64k" } };
    int root = make_mount("tmpfs", "none", options, 2, 0, step);
    if (root < 0)
        return root;
    *step = "template";
    int error = fill_template(root);
    if (!error)
        error = k_mount_setattr(root, "", AT_EMPTY_PATH,
                                MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC, -1);
    if (!error) {
        *step = "take_root";
        error = take_root(root);
    }
    close(root);
    return error;
}

/* Try it: lowering needs CAP_SYS_RESOURCE in the initial namespace, which containers often lack. */
static bool can_lower_oom(void)
{
    int fd = open("/proc/self/oom_score_adj", O_RDWR | O_CLOEXEC);
    char old[16] = "";
    if (fd < 0)
        return false;
    ssize_t size = read(fd, old, sizeof old - 1);
    bool lowered = size > 0 && pwrite(fd, "-900", 4, 0) == 4;
    if (lowered && pwrite(fd, old, (size_t)size, 0) < 0)
        lowered = false;
    close(fd);
    return lowered;
}

int enter_host(struct host *host, const char *init, const char **step)
{
    umask(022);
    host->may_lower_oom = can_lower_oom();
    *step = "stack";
    host->stack = make_stack();
    host->helper_stack = make_stack();
    if (!host->stack || !host->helper_stack)
        return -ENOMEM;
    *step = "open";
    host->root = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    host->host_mounts = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC);
    host->init = open(init, O_PATH | O_CLOEXEC);
    host->net = open("/proc/thread-self/net", O_PATH | O_DIRECTORY | O_CLOEXEC);
    host->own_netns = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    if (host->root < 0 || host->host_mounts < 0 || host->init < 0 || host->net < 0 ||
        host->own_netns < 0)
        return -errno;
    *step = "unshare";
    if (unshare(CLONE_NEWNS) < 0)
        return -errno;
    *step = "propagation";
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
        return -errno;
    *step = "own_mounts";
    host->own_mounts = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC);
    if (host->own_mounts < 0)
        return -errno;
    int error = make_root(step);
    if (error < 0)
        return error;
    *step = "null";
    host->null = open("/dev/null", O_RDWR | O_CLOEXEC);
    return host->null < 0 ? -errno : 0;
}

/* --- files of the host ------------------------------------------------------------------------- */

int host_open(const struct host *host, const char *path, int flags)
{
    return k_openat2(host->root, path, (uint64_t)flags, RESOLVE_IN_ROOT);
}

int host_parent(const struct host *host, const char *path, const char **name)
{
    char folder[4096];
    const char *slash = strrchr(path, '/');

    if (*path != '/' || !slash[1] || (size_t)(slash - path) >= sizeof folder)
        return -EINVAL;
    *name = slash + 1;
    if (strcmp(*name, ".") == 0 || strcmp(*name, "..") == 0)
        return -EINVAL;
    size_t size = slash == path ? 1 : (size_t)(slash - path);
    memcpy(folder, path, size);
    folder[size] = 0;
    return host_open(host, folder, O_PATH | O_DIRECTORY);
}

int host_write(const struct host *host, const char *path, const char *value)
{
    int fd = host_open(host, path, O_WRONLY);
    if (fd < 0)
        return fd;
    int error = write(fd, value, strlen(value)) < 0 ? -errno : 0;
    close(fd);
    return error;
}

int host_remove(const struct host *host, const char *path)
{
    const char *name;
    if (!*path)
        return 0;
    int parent = host_parent(host, path, &name);
    if (parent < 0)
        return parent == -ENOENT ? 0 : parent;
    int error = remove_tree(parent, name);
    close(parent);
    return error;
}

int host_clone_mount(struct host *host, int fd, const char *path)
{
    /* A detached mount made by fsmount may be cloned from anywhere; one that is attached on the host, or
     * was cloned there, only from there (may_copy_tree in fs/namespace.c). */
    if (fd >= 0) {
        int tree = k_open_tree(fd, "", OPEN_TREE_CLONE | AT_EMPTY_PATH);
        if (tree != -EINVAL || host->away)
            return tree;
    }
    if (!host->away) {
        if (setns(host->host_mounts, CLONE_NEWNS) < 0)
            return -errno;
        host->away = true;
    }
    return fd >= 0 ? k_open_tree(fd, "", OPEN_TREE_CLONE | AT_EMPTY_PATH)
                   : k_open_tree(AT_FDCWD, path, OPEN_TREE_CLONE);
}

int host_visit(struct host *host, int pidfd)
{
    if (setns(pidfd, CLONE_NEWNS) < 0)
        return -errno;
    host->away = true;
    return 0;
}

int host_anchor(struct host *host, int fd)
{
    host_return(host);
    int error = k_move_mount(fd, AT_FDCWD, ANCHOR);
    if (error == 0)
        host->anchored++;
    return error;
}

void host_unanchor(struct host *host)
{
    if (host->anchored)
        host_return(host);
    for (; host->anchored; host->anchored--)
        if (umount2(ANCHOR, MNT_DETACH) < 0)
            abort(); /* the next container would find it where its masks come from */
}

bool host_netns_reusable(const struct host *host, int netns)
{
    if (setns(netns, CLONE_NEWNET) < 0)
        return false;
    bool reusable = own_netns_reusable(host->net);
    if (setns(host->own_netns, CLONE_NEWNET) < 0)
        abort(); /* a sandbox's namespace would leak into all that follows */
    return reusable;
}

void host_return(struct host *host)
{
    if (host->away && setns(host->own_mounts, CLONE_NEWNS) < 0)
        abort(); /* a container must never be cloned from the host's mount namespace */
    host->away = false;
}
