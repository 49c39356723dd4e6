#include "spawner/guards.h"

#include <limits.h>
#include <sys/stat.h>

#include "native/kernel.h"

#ifndef MOVE_MOUNT_T_EMPTY_PATH
#define MOVE_MOUNT_T_EMPTY_PATH 0x00000040
#endif

static uint64_t attributes(const struct guard *guard)
{
    return (guard->how & GUARD_READ_ONLY ? MOUNT_ATTR_RDONLY : 0) |
           (guard->how & GUARD_NO_EXEC ? MOUNT_ATTR_NOEXEC : 0);
}

/* As root inside would have made it. */
static int make_entry(const struct creation *c, int at, const char *name, bool file)
{
    int error = file ? mknodat(at, name, S_IFREG | 0644, 0) : mkdirat(at, name, 0755);
    if (error == 0)
        error = fchownat(at, name, c->plan->uid_base, c->plan->uid_base, AT_SYMLINK_NOFOLLOW);
    return error < 0 ? -errno : 0;
}

/* A symbolic link may be what a guard is for, but nothing is reached through one: it would be somebody
 * else's word for where the guard goes. */
static int open_entry(const struct creation *c, int at, const char *name, bool file)
{
    int fd = k_openat2(at, name, O_PATH | O_NOFOLLOW, RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS);
    if (fd == -ENOENT) {
        int error = make_entry(c, at, name, file);
        fd = error < 0 ? error
                       : k_openat2(at, name, O_PATH | O_NOFOLLOW,
                                   RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS);
    }
    struct stat st;
    if (fd == -ENOTDIR && fstat(at, &st) == 0 && S_ISLNK(st.st_mode))
        fd = -ELOOP;
    return fd;
}

/* Open the path of a guard, and make what is missing of it: an empty file, and directories on the way to it.
 * A guard on a path that does not exist must hold when somebody would make it. */
static int reach(const struct creation *c, const struct guard *guard)
{
    char name[NAME_MAX + 1];
    const char *path = guard->path;
    int at = k_openat2(c->fd[FD_OVERLAY], "/", O_PATH | O_DIRECTORY, RESOLVE_IN_ROOT);

    while (at >= 0 && *path == '/') {
        size_t size = strcspn(++path, "/");
        if (size > NAME_MAX) {
            close(at);
            return -ENAMETOOLONG;
        }
        memcpy(name, path, size);
        name[size] = 0;
        path += size;
        int next = open_entry(c, at, name, !*path && guard->how);
        close(at);
        at = next;
    }
    return at;
}

/* A closed file or directory of the spawner's read-only root; or the thing itself. */
static int clone_for(const struct guard *guard, int at)
{
    struct stat st;

    if (!(guard->how & GUARD_MASK))
        return k_open_tree(at, "", OPEN_TREE_CLONE | AT_RECURSIVE | AT_EMPTY_PATH);
    if (fstat(at, &st) < 0)
        return -errno;
    return k_open_tree(AT_FDCWD, S_ISDIR(st.st_mode) ? "closed-dir" : "closed-file",
                       OPEN_TREE_CLONE);
}

static int cover(const struct guard *guard, int at)
{
    int tree = clone_for(guard, at);
    if (tree < 0)
        return tree;
    int error = 0;
    if (attributes(guard))
        error = k_mount_setattr(tree, "", AT_EMPTY_PATH | AT_RECURSIVE, attributes(guard), -1);
    if (error == 0)
        error = (int)KERNEL(syscall(SYS_move_mount, tree, "", at, "",
                                    MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH));
    close(tree);
    return error;
}

static int attach_guard(const struct creation *c, const struct guard *guard)
{
    if (strcmp(guard->path, "/") == 0) /* a mount over the root would not be seen by who stands in it */
        return k_mount_setattr(c->fd[FD_OVERLAY], "", AT_EMPTY_PATH, attributes(guard), -1);
    int at = reach(c, guard);
    /* What we may not make there (below a guard before this one, in /proc), or only with a file turned
     * into a directory, which is a guard before this one: nobody inside can. */
    if (at == -EROFS || at == -EPERM || at == -ENOTDIR)
        return 0;
    if (at < 0)
        return at;
    int error = cover(guard, at);
    close(at);
    return error;
}

int attach_guards(struct creation *c)
{
    for (uint32_t i = 0; i < c->plan->guard_count; i++) {
        int error = attach_guard(c, &c->plan->guards[i]);
        if (error < 0) {
            c->where = c->plan->guards[i].path;
            return error;
        }
    }
    return (int)KERNEL(chdir("/"));
}
