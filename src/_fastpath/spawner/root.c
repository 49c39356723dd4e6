#include "spawner/root.h"

#include <poll.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/xattr.h>

#include "native/kernel.h"
#include "native/mounts.h"
#include "native/quota.h"
#include "native/tree.h"

#ifndef MOVE_MOUNT_T_EMPTY_PATH
#define MOVE_MOUNT_T_EMPTY_PATH 0x00000040
#endif

#ifndef PIDFD_GET_MNT_NAMESPACE /* include/uapi/linux/pidfd.h, Linux 6.11 */
#define PIDFD_GET_IPC_NAMESPACE _IO(0xFF, 2)
#define PIDFD_GET_MNT_NAMESPACE _IO(0xFF, 3)
#define PIDFD_GET_UTS_NAMESPACE _IO(0xFF, 10)
#endif

#define INODE_BYTES 4096 /* of upper per inode that a memory upper may hold */
#define DEATH_TIMEOUT_MS 10000
#define XATTR_ROOM (64u << 10)

void start_creation(struct creation *c, struct host *host, const struct container_plan *plan)
{
    *c = (struct creation){ .host = host, .plan = plan, .pidfd = -1 };
    c->steps.fail = plan->fail_step;
    c->steps.trace = plan->trace;
    memset(c->fd, -1, sizeof c->fd);
    memset(c->lowers, -1, sizeof c->lowers);
    memset(c->binds, -1, sizeof c->binds);
}

int await_death(int pidfd)
{
    struct pollfd entry = { .fd = pidfd, .events = POLLIN };
    int ready;
    do
        ready = poll(&entry, 1, DEATH_TIMEOUT_MS);
    while (ready < 0 && errno == EINTR);
    return ready > 0 ? 0 : -ETIMEDOUT;
}

/* --- the upper ------------------------------------------------------------------------------------ */

int make_directory(struct creation *c, const char *path, mode_t mode, bool may_exist, bool *made)
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

/* What is attached for a moment dies with that; a clone of it does not. */
static int anchor_upper(struct creation *c)
{
    int error = host_anchor(c->host, c->fd[FD_UPPER]);
    if (error < 0)
        return error;
    c->fd[FD_ANCHOR] = c->fd[FD_UPPER];
    return c->fd[FD_UPPER] = k_open_tree(c->fd[FD_ANCHOR], "", OPEN_TREE_CLONE | AT_EMPTY_PATH);
}

int make_upper(struct creation *c)
{
    int fd = c->fd[FD_UPPER] = *c->plan->upper_dir ? make_disk_upper(c) : make_memory_upper(c);
    return fd >= 0 && c->host->by_path ? anchor_upper(c) : fd;
}

static int make_owned(const struct creation *c, const char *name)
{
    int at = c->fd[c->host->by_path ? FD_ANCHOR : FD_UPPER];
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
int fill_upper(struct creation *c)
{
    c->made_upper = true;
    int u = c->fd[FD_LAYER_U] = make_owned(c, "u");
    int w = u < 0 ? u : (c->fd[FD_LAYER_W] = make_owned(c, "w"));
    return w < 0 ? w : 0;
}

int make_shm(struct creation *c)
{
    int s = make_owned(c, "s");
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

int make_files(struct creation *c)
{
    for (uint32_t i = 0; i < c->plan->file_count; i++) {
        int error = make_file(c, &c->plan->files[i]);
        if (error < 0)
            return error;
    }
    return 0;
}

/* --- the lowers and the overlay --------------------------------------------------------------------- */

/* Attributes of other file systems' making (user., security., ACLs); overlayfs keeps its own. */
static int copy_xattrs(int from, int to)
{
    static char names[XATTR_ROOM], value[XATTR_ROOM]; /* the most that the kernel gives */
    ssize_t size = flistxattr(from, names, sizeof names);

    for (char *name = names; size > 0 && name < names + size; name += strlen(name) + 1) {
        if (strncmp(name, "trusted.overlay.", 16) == 0)
            continue;
        ssize_t length = fgetxattr(from, name, value, sizeof value);
        if (length < 0 || fsetxattr(to, name, value, (size_t)length, 0) < 0)
            return -errno;
    }
    return size < 0 && errno != EOPNOTSUPP ? -errno : 0;
}

/* What an overlay shows of its root directory is the upper's: a fresh one takes over what the sandbox
 * made of it before. */
static int inherit_root(const struct creation *c)
{
    int to = c->fd[FD_LAYER_U], error = 0;
    struct stat st;

    if (!c->plan->raw_lowers)
        return 0;
    int from = openat(c->lowers[c->plan->lowers - 1], ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (from < 0)
        return -errno;
    if (fstat(from, &st) < 0 || fchown(to, st.st_uid, st.st_gid) < 0 ||
        fchmod(to, st.st_mode & 07777) < 0)
        error = -errno;
    if (error == 0)
        error = copy_xattrs(from, to);
    if (error == 0)
        error = (int)KERNEL(futimens(to, (struct timespec[]){ st.st_atim, st.st_mtim }));
    close(from);
    return error;
}

/* The topmost may be uppers of checkpoints: the ids in them are right as they are. */
int map_lowers(struct creation *c, const int *given)
{
    uint32_t layers = c->plan->lowers - c->plan->raw_lowers;
    for (uint32_t i = 0; i < c->plan->lowers; i++) {
        /* Where no clone of it can be made, the daemon made the given one for us alone. */
        int tree = c->lowers[i] = c->host->by_path ? k_dup_from(given[i], 0)
                                                   : host_clone_mount(c->host, given[i], NULL);
        if (tree < 0)
            return tree;
        int error = k_mount_setattr(tree, "", AT_EMPTY_PATH,
                                    MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV |
                                        (i < layers ? MOUNT_ATTR_IDMAP : 0),
                                    i < layers ? c->fd[FD_USERNS] : -1);
        if (error < 0)
            return error;
    }
    return inherit_root(c);
}

/* redirect_dir: without it renaming a directory of a lower is EXDEV. volatile: the upper dies with the
 * sandbox, so fsync needs no disk. index and metacopy are off whatever the kernel's default is: the
 * first refuses a lower that is the upper of a live overlay, the second leaves files without data. */
static int set_settings(int fs)
{
    static const char *const settings[][2] = {
        { "redirect_dir", "on" }, { "uuid", "null" }, { "index", "off" }, { "metacopy", "off" },
    };
    int error = k_fsconfig(fs, FSCONFIG_SET_STRING, "source", "none", 0);
    for (unsigned i = 0; i < sizeof settings / sizeof *settings && error >= 0; i++)
        error = k_fsconfig(fs, FSCONFIG_SET_STRING, settings[i][0], settings[i][1], 0);
    if (error >= 0)
        error = k_fsconfig(fs, FSCONFIG_SET_FLAG, "volatile", NULL, 0);
    return error;
}

/* Topmost first. */
static int stack_by_fd(struct creation *c, int fs)
{
    int error = 0;
    for (uint32_t i = c->plan->lowers; i-- > 0 && error >= 0;)
        error = k_fsconfig(fs, FSCONFIG_SET_FD, "lowerdir+", NULL, c->lowers[i]);
    if (error >= 0)
        error = k_fsconfig(fs, FSCONFIG_SET_FD, "upperdir", NULL, c->fd[FD_LAYER_U]);
    return error < 0 ? error : k_fsconfig(fs, FSCONFIG_SET_FD, "workdir", NULL, c->fd[FD_LAYER_W]);
}

/* A mount that is attached has a path from everywhere: the working directory. */
static int set_path(int fs, const char *key, int mount, const char *path)
{
    if (fchdir(mount) < 0)
        return -errno;
    return k_fsconfig(fs, FSCONFIG_SET_STRING, key, path, 0);
}

static int stack_by_path(struct creation *c, int fs)
{
    int error = 0;
    for (uint32_t i = c->plan->lowers; i-- > 0 && error >= 0;) {
        error = host_anchor(c->host, c->lowers[i]);
        if (error >= 0)
            error = set_path(fs, "lowerdir+", c->lowers[i], ".");
    }
    if (error >= 0)
        error = set_path(fs, "upperdir", c->fd[FD_ANCHOR], "u");
    if (error >= 0)
        error = set_path(fs, "workdir", c->fd[FD_ANCHOR], "w");
    return chdir("/") < 0 && error >= 0 ? -errno : error;
}

int make_overlay(struct creation *c)
{
    int fs = k_fsopen("overlay");
    if (fs < 0)
        return fs;
    int result = set_settings(fs);
    if (result >= 0)
        result = c->host->by_path ? stack_by_path(c, fs) : stack_by_fd(c, fs);
    if (result >= 0)
        result = k_fsconfig(fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0);
    if (result >= 0)
        result = c->fd[FD_OVERLAY] = k_fsmount(fs, MOUNT_ATTR_NODEV);
    close(fs);
    host_unanchor(c->host);
    return result;
}

int clone_binds(struct creation *c)
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

/* --- undoing ---------------------------------------------------------------------------------------- */

void close_root(struct creation *c)
{
    for (int i = FD_UPPER; i <= FD_PROC; i++)
        close_if(&c->fd[i]);
    for (uint32_t i = 0; i < c->plan->lowers; i++)
        close_if(&c->lowers[i]);
    for (uint32_t i = 0; i < c->plan->bind_count; i++)
        close_if(&c->binds[i]);
}

/* Mounts are detached and go with their descriptors; what has a name is removed. */
void undo_root(struct creation *c)
{
    close_if(&c->fd[FD_OVERLAY]); /* first: it holds the upper and the work directory */
    host_unanchor(c->host);
    if (c->made_upper && *c->plan->upper_dir)
        for (const char *const *name = (const char *const[]){ "u", "w", "s", NULL }; *name; name++)
            remove_tree(c->fd[FD_UPPER], *name);
    close_root(c);
    if (c->made_upper_dir)
        host_remove(c->host, c->plan->upper_dir);
}

/* --- attaching, in a new mount namespace -------------------------------------------------------------- */

/* The overlay covers the small root of the spawner, which cannot be detached (it is the root of the
 * mount namespace) and need not be: it is read-only and holds nothing but /dev and empty masks. The
 * working directory stays in it: relative names are ours, absolute ones the sandbox's. */
int attach_root(struct creation *c)
{
    int overlay = c->fd[FD_OVERLAY], error = 0;
    int template = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC); /* in our copy of the namespace */

    if (template < 0)
        return -errno;
    error = k_move_mount(overlay, AT_FDCWD, "/");
    if (error == 0 && (fchdir(overlay) < 0 || chroot(".") < 0 || fchdir(template) < 0))
        error = -errno;
    close(template);
    return error;
}

/* What lies in a root is of the making of an image or of the sandbox: a symbolic link on the way leads
 * neither out of it nor through /proc to the descriptors of a process, and nothing is put where one at
 * the end leads, for a mask would be elsewhere then. */
static int open_inside(const struct creation *c, const char *path)
{
    return k_openat2(c->fd[FD_OVERLAY], path, O_PATH | O_NOFOLLOW,
                     RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS);
}

/* What `tree` can be mounted on: a directory, or an empty file. */
static int make_inside(const struct creation *c, int tree, const char *path)
{
    const char *name = strrchr(path, '/');
    char folder[1024];
    size_t size = name ? (size_t)(name - path) : sizeof folder;

    if (size >= sizeof folder || !name[1])
        return -EINVAL;
    memcpy(folder, path, size);
    folder[size] = 0;
    struct stat st;
    if (fstat(tree, &st) < 0)
        return -errno;
    int parent = open_inside(c, size ? folder : "/"), error = 0;
    if (parent < 0)
        return parent;
    name++;
    if ((S_ISDIR(st.st_mode) ? mkdirat(parent, name, 0755)
                             : mknodat(parent, name, S_IFREG | 0644, 0)) < 0 ||
        fchownat(parent, name, c->plan->uid_base, c->plan->uid_base, AT_SYMLINK_NOFOLLOW) < 0)
        error = -errno;
    close(parent);
    return error;
}

int attach_at(const struct creation *c, int tree, const char *path)
{
    int at = open_inside(c, path);
    if (at == -ENOENT) {
        int error = make_inside(c, tree, path);
        at = error < 0 ? error : open_inside(c, path);
    }
    if (at < 0)
        return at;
    int error = (int)KERNEL(syscall(SYS_move_mount, tree, "", at, "",
                                    MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH));
    close(at);
    return error;
}

int attach_binds(struct creation *c)
{
    for (uint32_t i = 0; i < c->plan->bind_count; i++) {
        int error = attach_at(c, c->binds[i], c->plan->binds[i].target);
        if (error < 0)
            return error;
    }
    return 0;
}

/* Asked of a pidfd: a walk through /proc would make its inodes, 40 µs and memory that stays. */
int open_namespaces(struct creation *c, unsigned count)
{
    static const struct {
        int fd;
        unsigned long request;
    } known[] = {
        { FD_NS_MNT, PIDFD_GET_MNT_NAMESPACE },
        { FD_NS_IPC, PIDFD_GET_IPC_NAMESPACE },
        { FD_NS_UTS, PIDFD_GET_UTS_NAMESPACE },
    };
    int error = 0, self = (int)KERNEL(syscall(SYS_pidfd_open, syscall(SYS_getpid), 0));

    if (self < 0)
        return self;
    for (unsigned i = 0; i < count && error == 0; i++) {
        int fd = c->fd[known[i].fd] = (int)KERNEL(ioctl(self, known[i].request, 0));
        error = fd < 0 ? fd : 0;
    }
    close(self);
    return error;
}
