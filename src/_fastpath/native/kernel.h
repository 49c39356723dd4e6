/* System calls that the C library lacks or wraps in a way that does not suit us.
 *
 * Every function of the native layer returns a result >= 0 or a negative errno; nothing sets a
 * global, logs or decides. Sources: the kernel's include/uapi and Documentation/filesystems.
 */
#ifndef DSEC_NATIVE_KERNEL_H
#define DSEC_NATIVE_KERNEL_H

#include <errno.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <linux/sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef MOVE_MOUNT_F_EMPTY_PATH
#define MOVE_MOUNT_F_EMPTY_PATH 0x00000004
#endif
#ifndef SYS_mount_setattr
#define SYS_mount_setattr 442
#endif

/* A raw system call's result as value or negative errno. */
#define KERNEL(call)                            \
    ({                                          \
        long kernel_result_ = (call);           \
        kernel_result_ < 0 ? -errno : kernel_result_; \
    })

static inline int k_fsopen(const char *type)
{
    return (int)KERNEL(syscall(SYS_fsopen, type, FSOPEN_CLOEXEC));
}

static inline int k_fsconfig(int fs, unsigned command, const char *key, const void *value, int aux)
{
    return (int)KERNEL(syscall(SYS_fsconfig, fs, command, key, value, aux));
}

static inline int k_fsmount(int fs, unsigned attributes)
{
    return (int)KERNEL(syscall(SYS_fsmount, fs, FSMOUNT_CLOEXEC, attributes));
}

static inline int k_open_tree(int at, const char *path, unsigned flags)
{
    return (int)KERNEL(syscall(SYS_open_tree, at, path, flags | OPEN_TREE_CLOEXEC));
}

/* Attach the detached mount `tree` at `path`. */
static inline int k_move_mount(int tree, int at, const char *path)
{
    return (int)KERNEL(syscall(SYS_move_mount, tree, "", at, path, MOVE_MOUNT_F_EMPTY_PATH));
}

static inline int k_mount_setattr(int at, const char *path, unsigned flags, uint64_t set,
                                  int userns)
{
    struct mount_attr attr = { .attr_set = set, .userns_fd = userns < 0 ? 0 : (uint64_t)userns };
    return (int)KERNEL(syscall(SYS_mount_setattr, at, path, flags, &attr, sizeof attr));
}

static inline int k_openat2(int at, const char *path, uint64_t flags, uint64_t resolve)
{
    struct open_how how = { .flags = flags | O_CLOEXEC, .resolve = resolve };
    return (int)KERNEL(syscall(SYS_openat2, at, path, &how, sizeof how));
}

/* A new file for writing, `path` below the directory `at` and through no symbolic link. */
static inline int k_create_file(int at, const char *path, unsigned mode)
{
    struct open_how how = { .flags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC,
                            .mode = mode,
                            .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS };
    return (int)KERNEL(syscall(SYS_openat2, at, path, &how, sizeof how));
}

/* fcntl(2) of musl makes two system calls of it. */
static inline int k_dup_from(int fd, int lowest)
{
    return (int)KERNEL(syscall(SYS_fcntl, fd, F_DUPFD_CLOEXEC, lowest));
}

static inline int k_close_range(unsigned first, unsigned last, unsigned flags)
{
    return (int)KERNEL(syscall(SYS_close_range, first, last, flags));
}

static inline void close_if(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

#endif
