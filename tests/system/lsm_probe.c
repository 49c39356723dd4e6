/* Tries operations in a sandbox, as many as stdin has, and says how each ended.
 *
 * An operation is a name and two arguments, each ended by a NUL. The answer is a line with an errno,
 * 0 for success. Nothing is undone: each operation has files of its own, and runs in a child. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

enum { OPEN_TREE = 428, MOVE_MOUNT, FSOPEN, FSCONFIG, FSMOUNT };
enum { CREATE_FS = 6, EMPTY_FROM = 4, CLONE_TREE = 1, SETUP = 200 };

/* Ends the operation with errno when `call` fails. */
#define TRY(call)                  \
    do {                           \
        if ((long)(call) < 0)      \
            return errno;          \
    } while (0)
/* What must succeed for the operation to be one: a failure is told apart. */
#define NEED(call)                 \
    do {                           \
        if ((long)(call) < 0)      \
            return SETUP + errno;  \
    } while (0)

static int read_at(const char *path)
{
    char byte;
    struct stat st;
    int fd = open(path, O_RDONLY);
    TRY(fd);
    NEED(fstat(fd, &st));
    if (S_ISDIR(st.st_mode))
        TRY(syscall(SYS_getdents64, fd, (char[4096]){ 0 }, 4096));
    else
        TRY(read(fd, &byte, 1));
    return 0;
}

static int own_mounts(void)
{
    NEED(unshare(CLONE_NEWNS));
    NEED(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL));
    return 0;
}

static const char *name_of(const char *path) { return strrchr(path, '/') + 1; }

static char *folder_of(const char *path)
{
    char *copy = strdup(path);
    strrchr(copy, '/')[copy == strrchr(copy, '/')] = 0;
    return copy;
}

/* --- reading ---------------------------------------------------------------------------------- */

static int op_read(const char *a, const char *b) { return read_at(a); }

static int op_stat(const char *a, const char *b)
{
    struct stat st;
    TRY(lstat(a, &st));
    return 0;
}

static int op_read_reopened(const char *a, const char *b)
{
    char path[64];
    int fd = open(a, O_PATH);
    NEED(fd);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return read_at(path);
}

static int op_read_proc_root(const char *a, const char *b)
{
    char path[512];
    snprintf(path, sizeof path, "/proc/self/root%s", a);
    return read_at(path);
}

static int op_read_symlink(const char *a, const char *b)
{
    NEED(symlink(a, "/tmp/link"));
    int result = read_at("/tmp/link");
    NEED(unlink("/tmp/link"));
    return result;
}

static int op_read_chroot(const char *a, const char *b)
{
    char path[256];
    snprintf(path, sizeof path, "/%s", name_of(a));
    NEED(chroot(folder_of(a)));
    return read_at(path);
}

static int op_read_bind(const char *a, const char *b)
{
    char path[512];
    int error = own_mounts();
    snprintf(path, sizeof path, "/mnt/%s", name_of(a));
    if (error)
        return error;
    NEED(mount(folder_of(a), "/mnt", NULL, MS_BIND, NULL));
    return read_at(path);
}

/* Below an overlay of its own, whose layers are opened with the rights of who mounted it. */
static int op_read_overlay(const char *a, const char *b)
{
    char path[512], options[512];
    int error = own_mounts();
    if (error)
        return error;
    snprintf(options, sizeof options, "lowerdir=%s:/mnt", folder_of(a));
    snprintf(path, sizeof path, "/srv/%s", name_of(a));
    NEED(mount("overlay", "/srv", "overlay", 0, options));
    return read_at(path);
}

static int op_map_exec(const char *a, const char *b)
{
    int fd = open(a, O_RDONLY);
    TRY(fd);
    TRY(mmap(NULL, 1, PROT_READ | PROT_EXEC, MAP_PRIVATE, fd, 0) == MAP_FAILED ? -1 : 0);
    return 0;
}

static int op_execute(const char *a, const char *b)
{
    int status;
    pid_t pid = vfork();
    if (pid == 0) {
        execl(a, a, NULL);
        _exit(errno);
    }
    NEED(waitpid(pid, &status, 0));
    return WEXITSTATUS(status);
}

/* --- changing --------------------------------------------------------------------------------- */

static int op_write(const char *a, const char *b)
{
    TRY(open(a, O_WRONLY));
    return 0;
}

static int op_write_reopened(const char *a, const char *b)
{
    char path[64];
    int fd = open(a, O_PATH);
    NEED(fd);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    TRY(open(path, O_RDWR));
    return 0;
}

static int op_create(const char *a, const char *b)
{
    TRY(open(a, O_WRONLY | O_CREAT | O_EXCL, 0600));
    return 0;
}

static int op_tmpfile(const char *a, const char *b)
{
    TRY(open(a, O_TMPFILE | O_WRONLY, 0600));
    return 0;
}

static int op_mkdir(const char *a, const char *b)
{
    TRY(mkdir(a, 0700));
    return 0;
}

static int op_symlink(const char *a, const char *b)
{
    TRY(symlink("/etc", a));
    return 0;
}

static int op_mknod(const char *a, const char *b)
{
    TRY(mknod(a, S_IFIFO | 0600, 0));
    return 0;
}

static int op_rmdir(const char *a, const char *b)
{
    TRY(rmdir(a));
    return 0;
}

static int op_unlink(const char *a, const char *b)
{
    TRY(unlink(a));
    return 0;
}

static int op_rename(const char *a, const char *b)
{
    TRY(rename(a, b));
    return 0;
}

static int op_exchange(const char *a, const char *b)
{
    TRY(syscall(SYS_renameat2, AT_FDCWD, a, AT_FDCWD, b, 2));
    return 0;
}

static int op_link(const char *a, const char *b)
{
    TRY(link(a, b));
    return 0;
}

static int op_truncate(const char *a, const char *b)
{
    TRY(truncate(a, 5));
    return 0;
}

static int op_fallocate(const char *a, const char *b)
{
    int fd = open(a, O_RDWR);
    TRY(fd);
    TRY(fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, 1));
    return 0;
}

static int op_chmod(const char *a, const char *b)
{
    TRY(chmod(a, 0755));
    return 0;
}

static int op_chmod_reopened(const char *a, const char *b)
{
    char path[64];
    int fd = open(a, O_PATH);
    NEED(fd);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    TRY(chmod(path, 0755));
    return 0;
}

static int op_chown(const char *a, const char *b)
{
    TRY(chown(a, 0, 0));
    return 0;
}

static int op_utime(const char *a, const char *b)
{
    TRY(utimensat(AT_FDCWD, a, NULL, 0));
    return 0;
}

static int op_setxattr(const char *a, const char *b)
{
    TRY(setxattr(a, "user.try", "1", 1, 0));
    return 0;
}

static int op_acl(const char *a, const char *b)
{
    /* version 2; user::rwx, group::r-x, other::r-x (linux/posix_acl_xattr.h) */
    static const unsigned char acl[] = { 2, 0, 0, 0, 1, 0, 7, 0, 255, 255, 255, 255,
                                         4, 0, 5, 0, 255, 255, 255, 255,
                                         32, 0, 5, 0, 255, 255, 255, 255 };
    TRY(setxattr(a, "system.posix_acl_access", acl, sizeof acl, 0));
    return 0;
}

/* --- mounts ----------------------------------------------------------------------------------- */

static int op_mount(const char *a, const char *type)
{
    int error = own_mounts();
    if (error)
        return error;
    TRY(mount("none", a, type, 0, NULL));
    return 0;
}

static int op_bind(const char *a, const char *b)
{
    int error = own_mounts();
    if (error)
        return error;
    TRY(mount(b, a, NULL, MS_BIND, NULL));
    return 0;
}

static int op_new_mount(const char *a, const char *type)
{
    int error = own_mounts();
    if (error)
        return error;
    int fs = syscall(FSOPEN, type, 0);
    NEED(fs);
    NEED(syscall(FSCONFIG, fs, CREATE_FS, NULL, NULL, 0));
    int tree = syscall(FSMOUNT, fs, 0, 0);
    NEED(tree);
    TRY(syscall(MOVE_MOUNT, tree, "", AT_FDCWD, a, EMPTY_FROM));
    return 0;
}

static int op_new_bind(const char *a, const char *b)
{
    int error = own_mounts();
    if (error)
        return error;
    int tree = syscall(OPEN_TREE, AT_FDCWD, b, CLONE_TREE);
    NEED(tree);
    TRY(syscall(MOVE_MOUNT, tree, "", AT_FDCWD, a, EMPTY_FROM));
    return 0;
}

static int op_pivot(const char *a, const char *b)
{
    int error = own_mounts();
    if (error)
        return error;
    NEED(mount("none", "/mnt", "tmpfs", 0, NULL));
    NEED(chdir("/mnt"));
    TRY(syscall(SYS_pivot_root, ".", "."));
    return 0;
}

/* --- sockets ---------------------------------------------------------------------------------- */

static int talk(const char *name, int type)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    socklen_t size = offsetof(struct sockaddr_un, sun_path) + strlen(name);
    memcpy(address.sun_path, name, strlen(name));
    if (*name == '@')
        address.sun_path[0] = 0;
    int server = socket(AF_UNIX, type, 0), client = socket(AF_UNIX, type, 0);
    NEED(bind(server, (void *)&address, size));
    if (type == SOCK_STREAM)
        NEED(listen(server, 1));
    int result = 0;
    if (type == SOCK_STREAM ? connect(client, (void *)&address, size)
                            : sendto(client, "x", 1, 0, (void *)&address, size) != 1)
        result = errno;
    return result;
}

static int op_connect(const char *a, const char *b) { return talk(a, SOCK_STREAM); }
static int op_send(const char *a, const char *b) { return talk(a, SOCK_DGRAM); }

/* --- time ------------------------------------------------------------------------------------- */

static int op_time(const char *a, const char *count)
{
    struct timespec begin, end;
    long n = atol(count);
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (long i = 0; i < n; i++) {
        int fd = open(a, O_RDONLY);
        TRY(fd);
        close(fd);
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    printf("%.0f ", ((end.tv_sec - begin.tv_sec) * 1e9 + end.tv_nsec - begin.tv_nsec) / n);
    return 0;
}

#define OP(name) { #name, op_##name }
static const struct {
    const char *name;
    int (*run)(const char *, const char *);
} operations[] = {
    OP(read), OP(stat), OP(read_reopened), OP(read_proc_root), OP(read_symlink), OP(read_chroot),
    OP(read_bind), OP(read_overlay), OP(map_exec), OP(execute), OP(write), OP(write_reopened),
    OP(create), OP(tmpfile), OP(mkdir), OP(symlink), OP(mknod), OP(rmdir), OP(unlink), OP(rename),
    OP(exchange), OP(link), OP(truncate), OP(fallocate), OP(chmod), OP(chmod_reopened), OP(chown),
    OP(utime), OP(setxattr), OP(acl), OP(mount), OP(bind), OP(new_mount),
    OP(new_bind), OP(pivot), OP(connect), OP(send), OP(time),
};

static int run(const char *name, const char *a, const char *b)
{
    for (size_t i = 0; i < sizeof operations / sizeof *operations; i++)
        if (strcmp(operations[i].name, name) == 0)
            return operations[i].run(a, b);
    return 255;
}

int main(void)
{
    static char input[1 << 20];
    size_t size = 0;
    ssize_t got;
    while ((got = read(0, input + size, sizeof input - 1 - size)) > 0)
        size += got;
    for (char *at = input; at < input + size;) {
        const char *name = at, *a = name + strlen(name) + 1, *b = a + strlen(a) + 1;
        int status;
        at = (char *)b + strlen(b) + 1;
        pid_t pid = fork();
        if (pid == 0) {
            int result = run(name, a, b);
            printf("%d\n", result);
            fflush(stdout);
            _exit(0);
        }
        waitpid(pid, &status, 0);
    }
    return 0;
}
