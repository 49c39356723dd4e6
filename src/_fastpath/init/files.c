#include "files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "config.h"
#include "file_tree.h"

int root_fd = -1;
static char start_directory[MAX_PATH]; /* of relative paths */

struct mp_bytes text_bytes(const char *text)
{
    return (struct mp_bytes){ (const uint8_t *)text, strlen(text) };
}

const char *absolute_path(struct mp_bytes path)
{
    static char buffers[2][2 * MAX_PATH]; /* rename has two */
    static int turn;
    char *out = buffers[turn++ & 1];
    const char *start = path.n && path.p[0] == '/' ? "" : start_directory;
    int n = snprintf(out, sizeof buffers[0], "%s%s%.*s", start, *start ? "/" : "", (int)path.n,
                     (const char *)path.p);
    if (n >= MAX_PATH)
        child_fail_errno(ENAMETOOLONG, "cannot use", path);
    return out;
}

int open_in_root(const char *path, int flags, mode_t mode)
{
    struct {
        uint64_t flags, mode, resolve;
    } how = {
        .flags = (uint64_t)(flags | O_CLOEXEC),
        .mode = flags & O_CREAT ? mode : 0,
        .resolve = 0x10 /* RESOLVE_IN_ROOT */ | 0x02 /* RESOLVE_NO_MAGICLINKS */,
    };
    for (int tries = 0;; tries++) {
        long fd = syscall(SYS_openat2, root_fd, path, &how, sizeof how);
        /* EAGAIN: a rename or mount raced with a ".." of the path. */
        if (fd >= 0 || errno != EAGAIN || tries == 64)
            return (int)fd;
    }
}

/* Open directory `path`, making what is missing. */
static int make_directories(char *path, mode_t mode)
{
    int parent = open_in_root("/", O_PATH | O_DIRECTORY, 0);
    for (char *p = path + strspn(path, "/"); *p;) {
        size_t n = strcspn(p, "/");
        char after = p[n];
        p[n] = 0;
        int next = open_in_root(path, O_PATH | O_DIRECTORY, 0);
        if (next < 0 && errno == ENOENT && (mkdirat(parent, p, mode) == 0 || errno == EEXIST))
            next = open_in_root(path, O_PATH | O_DIRECTORY, 0);
        if (next < 0)
            return -1;
        close(parent);
        parent = next;
        p[n] = after;
        p += n + strspn(p + n, "/");
    }
    return parent;
}

int open_parent(struct mp_bytes path, const char **name, bool make, mode_t mode)
{
    static char buffers[2][MAX_PATH];
    static int turn;
    char *out = buffers[turn++ & 1];
    strcpy(out, absolute_path(path));
    size_t n = strlen(out);
    while (n > 1 && out[n - 1] == '/')
        out[--n] = 0;
    char *last = strrchr(out, '/');
    *name = last[1] ? last + 1 : ".";
    if (strcmp(*name, "..") == 0 || (strcmp(*name, ".") == 0 && n > 1))
        child_fail(INVALID_ARGUMENT, "the path may not end in . or ..");
    if (last == out)
        return open_in_root("/", O_PATH | O_DIRECTORY, 0);
    *last = 0;
    int fd = open_in_root(out, O_PATH | O_DIRECTORY, 0);
    if (fd < 0 && errno == ENOENT && make)
        fd = make_directories(out, mode);
    if (fd < 0)
        child_fail_errno(errno, "cannot enter the directory of", path);
    return fd;
}

bool write_all(int fd, const void *data, size_t n)
{
    const char *p = data;
    while (n) {
        ssize_t wrote = write(fd, p, n);
        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote < 0)
            return false;
        p += wrote;
        n -= (size_t)wrote;
    }
    return true;
}

int read_all(int fd, void *data, size_t n)
{
    size_t done = 0;
    while (done < n) {
        ssize_t got = read(fd, (char *)data + done, n - done);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return got == 0 && done == 0 ? 0 : -1;
        done += (size_t)got;
    }
    return 1;
}

bool stream_was_committed(void)
{
    char mark;
    ssize_t n;
    do
        n = recv(CTL_FD, &mark, 1, 0);
    while (n < 0 && errno == EINTR);
    return n == 1 && mark == 'E';
}

_Noreturn void transferred(uint64_t size)
{
    uint8_t room[32];
    struct mp_writer w = mp_writer_of(room, sizeof room);
    mp_put_map(&w, 1);
    mp_put_text(&w, "size");
    mp_put_u64(&w, size);
    child_result(room, mp_written(&w));
}

static _Noreturn void done(void)
{
    static const uint8_t nil = 0xc0;
    child_result(&nil, 1);
}

static const char *type_name(mode_t mode)
{
    switch (mode & S_IFMT) {
    case S_IFREG: return "file";
    case S_IFDIR: return "dir";
    case S_IFLNK: return "symlink";
    case S_IFIFO: return "fifo";
    case S_IFSOCK: return "socket";
    case S_IFCHR: return "char";
    default: return "block";
    }
}

void put_stat(struct mp_writer *w, struct mp_bytes name, int dir, const char *entry,
              const struct stat *st)
{
    char target[MAX_PATH];
    ssize_t n = S_ISLNK(st->st_mode) ? readlinkat(dir, entry, target, sizeof target) : -1;
    mp_put_map(w, n >= 0 ? 8 : 7);
    mp_put_text(w, "name");
    mp_put_bin(w, name.p, name.n);
    mp_put_text(w, "type");
    mp_put_text(w, type_name(st->st_mode));
    mp_put_text(w, "size");
    mp_put_u64(w, (uint64_t)st->st_size);
    mp_put_text(w, "mode");
    mp_put_u64(w, st->st_mode & 07777);
    mp_put_text(w, "uid");
    mp_put_u64(w, st->st_uid);
    mp_put_text(w, "gid");
    mp_put_u64(w, st->st_gid);
    mp_put_text(w, "mtime");
    mp_put_f64(w, (double)st->st_mtim.tv_sec + (double)st->st_mtim.tv_nsec / 1e9);
    if (n >= 0) {
        mp_put_text(w, "target");
        mp_put_bin(w, target, (size_t)n);
    }
}

static _Noreturn void file_stat(const struct path_args *args)
{
    uint8_t room[2 * MAX_PATH + 256];
    struct mp_writer w = mp_writer_of(room, sizeof room);
    struct stat st;
    int fd = open_in_root(absolute_path(args->path), O_PATH | (args->nofollow ? O_NOFOLLOW : 0), 0);
    if (fd < 0 || fstat(fd, &st) < 0)
        child_fail_errno(errno, "cannot look at", args->path);
    struct mp_bytes name = args->path;
    while (name.n > 1 && name.p[name.n - 1] == '/')
        name.n--;
    const uint8_t *slash = name.n > 1 ? memrchr(name.p, '/', name.n) : NULL;
    if (slash) {
        name.n -= (size_t)(slash + 1 - name.p);
        name.p = slash + 1;
    }
    put_stat(&w, name, fd, "", &st);
    child_result(room, mp_written(&w));
}

static _Noreturn void file_mkdir(const struct path_args *args)
{
    const char *name;
    int parent = open_parent(args->path, &name, true, 0755);
    mode_t mode = args->mode.set ? (mode_t)args->mode.value : 0755;
    if (strcmp(name, ".") == 0)
        child_fail_errno(EEXIST, "cannot make", args->path);
    if (mkdirat(parent, name, mode) < 0)
        child_fail_errno(errno, "cannot make", args->path);
    if (args->mode.set && fchmodat(parent, name, mode, 0) < 0)
        child_fail_errno(errno, "cannot change the mode of", args->path);
    done();
}

static _Noreturn void file_rename(const struct path_args *args)
{
    const char *from, *to;
    int from_dir = open_parent(args->path, &from, false, 0);
    int to_dir = open_parent(args->target, &to, false, 0);
    if (renameat(from_dir, from, to_dir, to) < 0)
        child_fail_errno(errno, "cannot rename", args->path);
    done();
}

static _Noreturn void file_remove(const struct path_args *args)
{
    const char *name;
    struct stat st;
    int parent = open_parent(args->path, &name, false, 0);
    if (strcmp(name, ".") == 0)
        child_fail(INVALID_ARGUMENT, "the root cannot be removed");
    if (fstatat(parent, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        child_fail_errno(errno, "cannot remove", args->path);
    if (S_ISDIR(st.st_mode) && args->recursive && tree_remove(parent, name) < 0)
        child_fail_errno(errno, "cannot remove", args->path);
    if (unlinkat(parent, name, S_ISDIR(st.st_mode) ? AT_REMOVEDIR : 0) < 0)
        child_fail_errno(errno, "cannot remove", args->path);
    done();
}

static _Noreturn void file_change(const struct path_args *args, const struct tree_change *change)
{
    const char *name;
    int parent = open_parent(args->path, &name, false, 0);
    if (tree_change(parent, name, change, args->recursive) < 0)
        child_fail_errno(errno, change->chown ? "cannot change the owner of"
                                              : "cannot change the mode of", args->path);
    done();
}

static _Noreturn void file_chown(const struct path_args *args)
{
    struct tree_change change = { .chown = true, .uid = (uid_t)-1, .gid = (gid_t)-1 };
    struct identity who;
    const uint8_t *colon = memchr(args->owner.p, ':', args->owner.n);
    struct mp_bytes user = args->owner;
    if (colon) {
        struct mp_bytes group = { colon + 1, (size_t)(args->owner.p + args->owner.n - colon - 1) };
        user.n = (size_t)(colon - args->owner.p);
        if (!account_group(group, &change.gid))
            child_fail(NOT_FOUND, "no such group in the sandbox: %.*s", (int)group.n, group.p);
    }
    if (user.n && !account_find(user, &who))
        child_fail(NOT_FOUND, "no such user in the sandbox: %.*s", (int)user.n, user.p);
    if (user.n)
        change.uid = who.uid;
    file_change(args, &change);
}

_Noreturn void file_child(const struct file_task *task)
{
    const struct path_args *args = task->args;
    struct tree_change mode = { .mode = (mode_t)args->mode.value };
    struct identity who;
    if (task->op == FILE_PACK)
        vm_pack_child(&task->fds);
    child_enter(&task->fds, &(struct role){ .user = args->user }, &who);
    root_fd = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (root_fd < 0)
        child_fail_errno(errno, "cannot open the sandbox's root", (struct mp_bytes){ 0 });
    if (config.workdir.n)
        snprintf(start_directory, sizeof start_directory, "%.*s", (int)config.workdir.n,
                 config.workdir.p);
    else
        snprintf(start_directory, sizeof start_directory, "%s", who.home);
    switch (task->op) {
    case FILE_STAT: file_stat(args);
    case FILE_LIST: file_list(args);
    case FILE_GLOB: file_glob(args);
    case FILE_MKDIR: file_mkdir(args);
    case FILE_RENAME: file_rename(args);
    case FILE_REMOVE: file_remove(args);
    case FILE_CHMOD: file_change(args, &mode);
    case FILE_CHOWN: file_chown(args);
    case FILE_READ: file_read(args);
    case FILE_WRITE: file_write(args);
    case FILE_DOWNLOAD: tar_download(args);
    case FILE_UPLOAD: tar_upload(args);
    case FILE_WATCH: file_watch(args);
    case FILE_PACK: break;
    }
    _exit(127);
}
