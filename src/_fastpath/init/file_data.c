/* Reading and writing one file's content. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "files.h"
#include "loop.h"

#define COPY_BYTES (256u << 10)

static uint8_t *copy_buffer(void)
{
    static uint8_t *buffer;
    if (!buffer)
        buffer = map_alloc(COPY_BYTES);
    if (!buffer)
        child_fail_errno(ENOMEM, "cannot copy", (struct mp_bytes){ 0 });
    return buffer;
}

/* Fill the buffer as far as the file and `left` go. */
static size_t fill(int fd, uint8_t *buffer, size_t room, uint64_t left, struct mp_bytes path)
{
    size_t n = 0;
    if (room > left)
        room = (size_t)left;
    while (n < room) {
        ssize_t got = read(fd, buffer + n, room - n);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            child_fail_errno(errno, "cannot read", path);
        if (got == 0)
            break;
        n += (size_t)got;
    }
    return n;
}

static _Noreturn void send_small(const uint8_t *data, size_t n)
{
    static uint8_t room[INLINE_BYTES + 64];
    struct mp_writer w = mp_writer_of(room, sizeof room);
    mp_put_map(&w, 2);
    mp_put_text(&w, "size");
    mp_put_u64(&w, n);
    mp_put_text(&w, "data");
    mp_put_bin(&w, data, n);
    child_result(room, mp_written(&w));
}

_Noreturn void file_read(const struct path_args *args)
{
    struct stat st;
    /* O_NONBLOCK: a FIFO without a writer would hold us. */
    int fd = open_in_root(absolute_path(args->path), O_RDONLY | O_NONBLOCK | O_NOCTTY, 0);
    if (fd < 0 || fstat(fd, &st) < 0)
        child_fail_errno(errno, "cannot open", args->path);
    if (S_ISDIR(st.st_mode))
        child_fail_errno(EISDIR, "cannot read", args->path);
    if (S_ISFIFO(st.st_mode) || S_ISSOCK(st.st_mode))
        child_fail(INVALID_ARGUMENT, "not a file: %.*s", (int)args->path.n, args->path.p);
    if (args->offset.value && lseek(fd, (off_t)args->offset.value, SEEK_SET) < 0)
        child_fail_errno(errno, "cannot seek in", args->path);
    uint8_t *buffer = copy_buffer();
    uint64_t left = args->length.set ? args->length.value : UINT64_MAX, size = 0;
    size_t n = fill(fd, buffer, INLINE_BYTES + 1, left, args->path);
    if (n <= INLINE_BYTES)
        send_small(buffer, n);
    while (n) {
        if (!write_all(OUT_FD, buffer, n))
            _exit(127);
        size += n;
        left -= n;
        n = fill(fd, buffer, COPY_BYTES, left, args->path);
    }
    transferred(size);
}

/* --- write ---------------------------------------------------------------------------------- */

struct target {
    int dir;
    const char *name;
    struct stat st;
    bool exists;
};

/* Where the content goes: a symbolic link is followed, inside the root, to what it names. */
static void find_target(const struct path_args *args, struct target *target)
{
    static char path[2 * MAX_PATH], link[MAX_PATH];
    struct mp_bytes at = args->path;
    for (int hops = 0;; hops++) {
        target->dir = open_parent(at, &target->name, true, 0755);
        target->exists = fstatat(target->dir, target->name, &target->st, AT_SYMLINK_NOFOLLOW) == 0;
        if (!target->exists && errno != ENOENT)
            child_fail_errno(errno, "cannot look at", args->path);
        if (!target->exists || !S_ISLNK(target->st.st_mode))
            break;
        ssize_t n = readlinkat(target->dir, target->name, link, sizeof link - 1);
        if (n < 0 || hops == 40)
            child_fail_errno(n < 0 ? errno : ELOOP, "cannot follow", args->path);
        link[n] = 0;
        char before[MAX_PATH];
        snprintf(before, sizeof before, "%s", absolute_path(at));
        char *slash = strrchr(before, '/');
        *slash = 0;
        int length = snprintf(path, sizeof path, "%s%s%s", link[0] == '/' ? "" : before,
                              link[0] == '/' ? "" : "/", link);
        if (length >= MAX_PATH)
            child_fail_errno(ENAMETOOLONG, "cannot follow", args->path);
        at = text_bytes(path);
    }
    if (target->exists && S_ISDIR(target->st.st_mode))
        child_fail_errno(EISDIR, "cannot write", args->path);
    if (target->exists && !S_ISREG(target->st.st_mode) && !S_ISCHR(target->st.st_mode))
        child_fail(INVALID_ARGUMENT, "not a file: %.*s", (int)args->path.n, args->path.p);
}

static char temporary[64]; /* name in `temporary_dir`, removed when the write fails */
static int temporary_dir = -1, temporary_fd = -1;

/* Name and content: the room is there again when the caller hears of the failure. */
static void drop_temporary(void)
{
    if (temporary_dir < 0)
        return;
    unlinkat(temporary_dir, temporary, 0);
    close(temporary_fd);
    temporary_dir = temporary_fd = -1;
}

static _Noreturn void write_failed(int err, const struct path_args *args)
{
    drop_temporary();
    child_fail_errno(err, "cannot write", args->path);
}

/* All content of the call to `fd`; a stream that its caller abandoned ends the child. */
static uint64_t take_content(int fd, const struct path_args *args)
{
    if (args->data.p) {
        if (!write_all(fd, args->data.p, args->data.n))
            write_failed(errno, args);
        return args->data.n;
    }
    uint8_t *buffer = copy_buffer();
    uint64_t size = 0;
    for (;;) {
        ssize_t n = read(IN_FD, buffer, COPY_BYTES);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            break;
        if (!write_all(fd, buffer, (size_t)n))
            write_failed(errno, args);
        size += (uint64_t)n;
    }
    if (!stream_was_committed()) {
        drop_temporary();
        _exit(1);
    }
    return size;
}

static _Noreturn void write_in_place(struct target *target, const struct path_args *args)
{
    mode_t mode = args->mode.set ? (mode_t)args->mode.value : 0644;
    int flags = O_WRONLY | O_NOCTTY | O_NOFOLLOW | O_CLOEXEC | O_CREAT;
    int fd = openat(target->dir, target->name, flags | (args->append ? O_APPEND : O_TRUNC), mode);
    if (fd < 0)
        child_fail_errno(errno, "cannot open", args->path);
    uint64_t size = take_content(fd, args);
    if (args->mode.set && fchmod(fd, mode) < 0)
        child_fail_errno(errno, "cannot change the mode of", args->path);
    if (close(fd) < 0)
        child_fail_errno(errno, "cannot write", args->path);
    transferred(size);
}

/* The target is a mount point (/etc/hosts and the like): its content can only be replaced. */
static void copy_over(int from, struct target *target, const struct path_args *args)
{
    int fd = openat(target->dir, target->name, O_WRONLY | O_TRUNC | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 || lseek(from, 0, SEEK_SET) < 0)
        write_failed(errno, args);
    uint8_t *buffer = copy_buffer();
    for (size_t n; (n = fill(from, buffer, COPY_BYTES, UINT64_MAX, args->path)) > 0;)
        if (!write_all(fd, buffer, n))
            write_failed(errno, args);
    drop_temporary();
}

static int open_temporary(struct target *target)
{
    for (unsigned i = 0; i < 100; i++) {
        snprintf(temporary, sizeof temporary, TEMPORARY_PREFIX "%d-%u", (int)getpid(), i);
        int fd = openat(target->dir, temporary, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                        0600);
        if (fd >= 0) {
            temporary_dir = target->dir;
            temporary_fd = fd;
        }
        if (fd >= 0 || errno != EEXIST)
            return fd;
    }
    return -1;
}

_Noreturn void file_write(const struct path_args *args)
{
    struct target target;
    find_target(args, &target);
    if (args->append || (target.exists && S_ISCHR(target.st.st_mode)))
        write_in_place(&target, args);
    /* A rename asks for the directory's permission only: ask for the file's as well. */
    if (target.exists && faccessat(target.dir, target.name, W_OK, 0) < 0)
        child_fail_errno(errno, "cannot write", args->path);
    int fd = open_temporary(&target);
    if (fd < 0 && target.exists && (errno == EACCES || errno == EPERM || errno == EROFS))
        write_in_place(&target, args);
    if (fd < 0)
        child_fail_errno(errno, "cannot write", args->path);
    uint64_t size = take_content(fd, args);
    mode_t mode = target.exists ? target.st.st_mode & 07777 : 0644;
    if (args->mode.set)
        mode = (mode_t)args->mode.value;
    if (target.exists && fchown(fd, target.st.st_uid, target.st.st_gid) < 0 && errno != EPERM)
        write_failed(errno, args);
    if (fchmod(fd, mode) < 0)
        write_failed(errno, args);
    if (renameat(target.dir, temporary, target.dir, target.name) == 0)
        transferred(size);
    if (errno != EBUSY)
        write_failed(errno, args);
    copy_over(fd, &target, args);
    transferred(size);
}
