/* Tries operations inside a sandbox, as many as a command's stdin has, and says how each ended.
 *
 * An operation is its name and two arguments, each ended by a NUL; the answer is a line with an errno,
 * 0 for success. What succeeded is undone. Each runs in a child, which may change itself for good. */
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
#include <unistd.h>

enum { FSOPEN = 430, FSCONFIG, FSMOUNT, MOVE_MOUNT = 429, OPEN_TREE = 428 };
extern char **environ;

/* `expression` is negative on failure: then the operation ends with errno. */
#define TRY(expression)             \
    do {                            \
        if ((long)(expression) < 0) \
            return errno;           \
    } while (0)

static int read_at(int dir, const char *path)
{
    char byte;
    int fd;
    TRY(fd = openat(dir, path, O_RDONLY));
    TRY(read(fd, &byte, 1) < 0 && errno != EISDIR ? -1 : 0);
    return 0;
}

static int read_(const char *path, const char *unused)
{
    (void)unused;
    return read_at(AT_FDCWD, path);
}

static int write_(const char *path, const char *unused)
{
    (void)unused;
    TRY(open(path, O_WRONLY | O_APPEND));
    return 0;
}

static int rw_exists(const char *path, const char *unused)
{
    (void)unused;
    TRY(open(path, O_RDWR | O_CREAT, 0600));
    return 0;
}

static int create(const char *path, const char *unused)
{
    (void)unused;
    TRY(open(path, O_WRONLY | O_CREAT | O_EXCL, 0600));
    TRY(unlink(path));
    return 0;
}

static int mkdir_(const char *path, const char *unused)
{
    (void)unused;
    TRY(mkdir(path, 0700));
    TRY(rmdir(path));
    return 0;
}

static int symlink_(const char *path, const char *target)
{
    TRY(symlink(target, path));
    TRY(unlink(path));
    return 0;
}

static int mknod_(const char *path, const char *unused)
{
    (void)unused;
    TRY(mknod(path, S_IFIFO | 0600, 0));
    TRY(unlink(path));
    return 0;
}

/* Through a new name that is on the way for a moment: "symlink, read, unlink". */
static int read_link(const char *path, const char *target)
{
    TRY(symlink(target, path));
    int result = read_at(AT_FDCWD, path);
    TRY(unlink(path));
    return result;
}

static int unlink_(const char *path, const char *unused)
{
    (void)unused;
    TRY(unlink(path));
    return 0;
}

static int rmdir_(const char *path, const char *unused)
{
    (void)unused;
    TRY(rmdir(path));
    return 0;
}

static int rename_(const char *path, const char *to)
{
    TRY(rename(path, to));
    TRY(rename(to, path));
    return 0;
}

static int exchange(const char *path, const char *other)
{
    TRY(syscall(SYS_renameat2, AT_FDCWD, path, AT_FDCWD, other, 2));
    TRY(syscall(SYS_renameat2, AT_FDCWD, path, AT_FDCWD, other, 2));
    return 0;
}

static int link_(const char *path, const char *to)
{
    TRY(link(path, to));
    TRY(unlink(to));
    return 0;
}

static int chmod_(const char *path, const char *unused)
{
    struct stat st;
    (void)unused;
    TRY(stat(path, &st));
    TRY(chmod(path, st.st_mode & 07777));
    return 0;
}

static int chmod_fd(const char *path, const char *unused)
{
    char name[64];
    int fd;
    (void)unused;
    TRY(fd = open(path, O_PATH));
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    return chmod_(name, NULL);
}

static int chown_(const char *path, const char *unused)
{
    (void)unused;
    TRY(lchown(path, 0, 0));
    return 0;
}

static int truncate_(const char *path, const char *unused)
{
    struct stat st;
    (void)unused;
    TRY(stat(path, &st));
    TRY(truncate(path, st.st_size));
    return 0;
}

static int setxattr_(const char *path, const char *unused)
{
    (void)unused;
    TRY(setxattr(path, "user.dsec", "1", 1, 0));
    TRY(removexattr(path, "user.dsec"));
    return 0;
}

static int finish(const char *path, int fd)
{
    char *argv[] = { (char *)(size_t)"probe", (char *)(size_t)"exit", NULL };
    pid_t pid = vfork();
    int status;
    if (pid == 0) {
        if (fd >= 0)
            syscall(SYS_execveat, fd, "", argv, environ, AT_EMPTY_PATH);
        else
            execve(path, argv, environ);
        _exit(errno);
    }
    TRY(pid);
    TRY(waitpid(pid, &status, 0));
    return WIFEXITED(status) ? WEXITSTATUS(status) : EIO;
}

static int execute(const char *path, const char *unused)
{
    (void)unused;
    return finish(path, -1);
}

static int execute_fd(const char *path, const char *unused)
{
    int fd;
    (void)unused;
    TRY(fd = open(path, O_PATH));
    return finish(NULL, fd);
}

static int map_code(const char *path, const char *unused)
{
    int fd;
    (void)unused;
    TRY(fd = open(path, O_RDONLY));
    return mmap(NULL, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE, fd, 0) == MAP_FAILED ? errno : 0;
}

static int chroot_read(const char *root, const char *path)
{
    TRY(chroot(root));
    return read_at(AT_FDCWD, path);
}

/* A clone of `tree` that is mounted nowhere. */
static int detached_read(const char *tree, const char *path)
{
    int fd;
    TRY(fd = (int)syscall(OPEN_TREE, AT_FDCWD, tree, 1));
    return read_at(fd, path);
}

static int alone(void)
{
    TRY(unshare(CLONE_NEWNS));
    TRY(mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL));
    return 0;
}

static int bind_mount(const char *source, const char *at)
{
    TRY(alone() ? -1 : 0);
    TRY(mount(source, at, NULL, MS_BIND, NULL));
    return 0;
}

static int rbind_mount(const char *source, const char *at)
{
    TRY(alone() ? -1 : 0);
    TRY(mount(source, at, NULL, MS_BIND | MS_REC, NULL));
    return 0;
}

static int tree_mount(const char *source, const char *at)
{
    int fd;
    TRY(alone() ? -1 : 0);
    TRY(fd = (int)syscall(OPEN_TREE, AT_FDCWD, source, 1));
    TRY(syscall(MOVE_MOUNT, fd, "", AT_FDCWD, at, 4));
    return 0;
}

static int type_mount(const char *type, const char *at)
{
    TRY(alone() ? -1 : 0);
    TRY(mount("none", at, type, 0, NULL));
    return 0;
}

static int new_mount(const char *type, const char *at)
{
    int fs, fd;
    TRY(alone() ? -1 : 0);
    TRY(fs = (int)syscall(FSOPEN, type, 0));
    TRY(syscall(FSCONFIG, fs, 6, NULL, NULL, 0));
    TRY(fd = (int)syscall(FSMOUNT, fs, 0, 0));
    TRY(syscall(MOVE_MOUNT, fd, "", AT_FDCWD, at, 4));
    return 0;
}

/* A read-only overlay of two directories, or of one on itself. */
static int overlay_mount(const char *lowers, const char *at)
{
    char options[512];
    TRY(alone() ? -1 : 0);
    snprintf(options, sizeof options, "lowerdir=%s", lowers);
    TRY(mount("none", at, "overlay", 0, options));
    return 0;
}

static int move_tmpfs(const char *from, const char *at)
{
    TRY(type_mount("tmpfs", from) ? -1 : 0);
    TRY(mount(from, at, NULL, MS_MOVE, NULL));
    return 0;
}

/* The old root comes to lie at `at` of a new one. */
static int pivot(const char *root, const char *path)
{
    char old[256];
    TRY(type_mount("tmpfs", root) ? -1 : 0);
    TRY(chdir(root));
    TRY(mkdir("old", 0700));
    TRY(syscall(SYS_pivot_root, ".", "old"));
    snprintf(old, sizeof old, "/old%s", path);
    return read_at(AT_FDCWD, old);
}

static int connect_(const char *path, const char *unused)
{
    struct sockaddr_un name = { .sun_family = AF_UNIX };
    int fd;
    (void)unused;
    snprintf(name.sun_path, sizeof name.sun_path, "%s", path);
    TRY(fd = socket(AF_UNIX, SOCK_STREAM, 0));
    TRY(connect(fd, (struct sockaddr *)&name, sizeof name));
    return 0;
}

static int change_profile(const char *order, const char *unused)
{
    int fd;
    (void)unused;
    TRY(fd = open("/proc/thread-self/attr/apparmor/current", O_WRONLY));
    TRY(write(fd, order, strlen(order)));
    return 0;
}

static int memory_file(const char *path, const char *unused)
{
    static char room[1 << 20];
    int from, fd;
    ssize_t n;
    (void)unused;
    TRY(from = open(path, O_RDONLY));
    TRY(n = read(from, room, sizeof room));
    TRY(fd = memfd_create("m", 0));
    TRY(write(fd, room, (size_t)n));
    return finish(NULL, fd);
}

static const struct {
    const char *name;
    int (*run)(const char *, const char *);
} operations[] = {
    { "read", read_ }, { "write", write_ }, { "open_rw", rw_exists }, { "create", create },
    { "mkdir", mkdir_ }, { "symlink", symlink_ }, { "mknod", mknod_ }, { "read_link", read_link },
    { "unlink", unlink_ }, { "rmdir", rmdir_ }, { "rename", rename_ }, { "exchange", exchange },
    { "link", link_ }, { "chmod", chmod_ }, { "chmod_fd", chmod_fd }, { "chown", chown_ },
    { "truncate", truncate_ }, { "setxattr", setxattr_ }, { "execute", execute },
    { "execute_fd", execute_fd }, { "map_code", map_code }, { "chroot_read", chroot_read },
    { "detached_read", detached_read }, { "bind", bind_mount }, { "rbind", rbind_mount },
    { "tree_mount", tree_mount }, { "type_mount", type_mount }, { "new_mount", new_mount },
    { "overlay_mount", overlay_mount }, { "move_tmpfs", move_tmpfs }, { "pivot", pivot },
    { "connect", connect_ }, { "change_profile", change_profile }, { "memory_file", memory_file },
};

static int perform(const char *name, const char *first, const char *second)
{
    for (size_t i = 0; i < sizeof operations / sizeof *operations; i++)
        if (strcmp(operations[i].name, name) == 0) {
            pid_t pid = fork();
            int status;
            if (pid == 0)
                _exit(operations[i].run(first, second));
            if (pid < 0 || waitpid(pid, &status, 0) < 0)
                return errno;
            return WIFEXITED(status) ? WEXITSTATUS(status) : EIO;
        }
    return ENOSYS;
}

int main(int argc, char **argv)
{
    char *field[3] = { NULL };
    size_t room[3] = { 0 };
    if (argc > 1 && strcmp(argv[1], "exit") == 0)
        return 0;
    for (;;) {
        for (int i = 0; i < 3; i++)
            if (getdelim(&field[i], &room[i], 0, stdin) < 0)
                return i ? 1 : 0;
        printf("%d\n", perform(field[0], field[1], field[2]));
        fflush(stdout);
    }
}
