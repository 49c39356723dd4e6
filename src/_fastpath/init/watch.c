/* inotify in the sandbox, as items of the call. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/inotify.h>
#include <unistd.h>

#include "files.h"
#include "loop.h"

#define WATCH_MASK \
    (IN_CREATE | IN_MODIFY | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO | IN_ATTRIB | IN_DELETE_SELF | \
     IN_MOVE_SELF)
#define WATCHES 65536
#define NAME_BYTES (16u << 20)

/* Paths of the watched directories by watch descriptor, relative to the first. inotify numbers
 * descriptors upwards and never again, so the table is an open hash. Untouched pages cost nothing. */
struct watched {
    int wd; /* 0: empty, -1: removed */
    uint32_t name; /* offset in `names` */
};

static struct watched *table;
static char *names;
static size_t names_n;
static int notify_fd, root_wd;
static bool recursive;

static struct watched *lookup(int wd)
{
    for (uint32_t i = (uint32_t)wd * 2654435761u, n = 0; n < WATCHES; i++, n++) {
        struct watched *w = &table[i % WATCHES];
        if (w->wd == wd || !w->wd)
            return w;
    }
    return NULL;
}

/* ".dsec-write-<pid>-<n>", as open_temporary in file_data.c makes them: a write is seen as the
 * appearance of the file, not as how it came about. */
static bool is_temporary(const char *name)
{
    static const char prefix[] = TEMPORARY_PREFIX;
    const char *pid = name + sizeof prefix - 1;
    if (strncmp(name, prefix, sizeof prefix - 1) != 0)
        return false;
    size_t n = strspn(pid, "0123456789");
    const char *number = pid + n + 1;
    return n && pid[n] == '-' && *number && !number[strspn(number, "0123456789")];
}

static void emit(const char *kind, const char *directory, const char *name)
{
    if (is_temporary(name))
        return;
    static uint8_t room[2 * MAX_PATH + 64];
    static char path[2 * MAX_PATH];
    struct mp_writer w = mp_writer_of(room, sizeof room);
    snprintf(path, sizeof path, "%s%s%s", directory, *directory && *name ? "/" : "", name);
    mp_put_map(&w, *path ? 2 : 1);
    mp_put_text(&w, "kind");
    mp_put_text(&w, kind);
    if (*path) {
        mp_put_text(&w, "name");
        mp_put_bin(&w, path, strlen(path));
    }
    if (!w.overflow && !child_send(REPORT_ITEM, room, mp_written(&w), -1))
        _exit(0); /* nobody listens any more */
}

static void remember(int wd, const char *name)
{
    size_t n = strlen(name) + 1;
    struct watched *w = lookup(wd);
    if (!w || names_n + n > NAME_BYTES)
        return;
    memcpy(names + names_n, name, n);
    *w = (struct watched){ wd, (uint32_t)names_n };
    names_n += n;
}

/* Watch the directory `fd`, and with `recursive` what is below. `announce`: it appeared while we
 * watched, so what it already holds was created unseen. */
static int add_directory(int fd, const char *name, bool announce, int depth)
{
    /* inotify takes a path; "." of the directory avoids both races and links. */
    if (fchdir(fd) < 0)
        return -1;
    int wd = inotify_add_watch(notify_fd, ".", WATCH_MASK | IN_ONLYDIR | IN_EXCL_UNLINK);
    if (wd < 0)
        return -1;
    remember(wd, name);
    if (!recursive || depth == 100)
        return wd;
    int listed = openat(fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = listed < 0 ? NULL : fdopendir(listed);
    for (struct dirent *d; dir && (d = readdir(dir));) {
        char path[MAX_PATH];
        if (strcmp(d->d_name, ".") == 0 || strcmp(d->d_name, "..") == 0)
            continue;
        if (announce)
            emit("create", name, d->d_name);
        int sub = openat(dirfd(dir), d->d_name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (sub < 0)
            continue;
        if (snprintf(path, sizeof path, "%s%s%s", name, *name ? "/" : "", d->d_name) <
            (int)sizeof path)
            add_directory(sub, path, announce, depth + 1);
        close(sub);
    }
    if (dir)
        closedir(dir);
    return wd;
}

/* A directory left: its watches, and those below, would report under a wrong name. */
static void forget_below(const char *path)
{
    size_t n = strlen(path);
    for (size_t i = 0; i < WATCHES; i++) {
        const char *name = names + table[i].name;
        if (table[i].wd > 0 && strncmp(name, path, n) == 0 && (!name[n] || name[n] == '/')) {
            inotify_rm_watch(notify_fd, table[i].wd);
            table[i].wd = -1;
        }
    }
}

/* A directory that was moved away, until the next event says whether it is still among the watched:
 * what happens in it meanwhile is already queued for its old watches. */
static struct {
    uint32_t cookie; /* 0: none */
    char path[2 * MAX_PATH];
} moving;

static void rename_below(const char *from, const char *to)
{
    size_t n = strlen(from);
    for (size_t i = 0; i < WATCHES; i++) {
        const char *name = names + table[i].name;
        char renamed[2 * MAX_PATH];
        if (table[i].wd > 0 && strncmp(name, from, n) == 0 && (!name[n] || name[n] == '/')) {
            snprintf(renamed, sizeof renamed, "%s%s", to, name + n);
            remember(table[i].wd, renamed);
        }
    }
}

/* `path`: where the directory of this event is now; NULL: the event is not about a directory. */
static void follow_move(const struct inotify_event *event, const char *path)
{
    bool arrived = path && event->mask & IN_MOVED_TO && event->cookie == moving.cookie;
    if (moving.cookie && arrived)
        rename_below(moving.path, path);
    else if (moving.cookie)
        forget_below(moving.path);
    moving.cookie = 0;
    if (path && event->mask & IN_MOVED_FROM) {
        moving.cookie = event->cookie;
        snprintf(moving.path, sizeof moving.path, "%s", path);
    }
}

static const char *kind_of(uint32_t mask)
{
    return mask & IN_CREATE       ? "create"
           : mask & IN_MODIFY     ? "modify"
           : mask & IN_DELETE     ? "remove"
           : mask & IN_MOVED_FROM ? "rename_from"
           : mask & IN_MOVED_TO   ? "rename_to"
           : mask & IN_ATTRIB     ? "attrib"
                                  : NULL;
}

static void handle(const struct inotify_event *event, int top)
{
    static const uint8_t nil = 0xc0;
    if (event->mask & IN_Q_OVERFLOW) {
        emit("overflow", "", "");
        return;
    }
    if (event->wd == root_wd && event->mask & (IN_DELETE_SELF | IN_MOVE_SELF)) {
        emit("remove", "", "");
        child_result(&nil, 1); /* what was watched is gone: so ends the call */
    }
    struct watched *w = lookup(event->wd);
    const char *kind = kind_of(event->mask);
    if (moving.cookie && !(event->mask & IN_MOVED_TO)) {
        follow_move(event, NULL); /* may forget what this event is about */
        w = lookup(event->wd);
    }
    if (!w || w->wd != event->wd || !kind)
        return;
    const char *directory = names + w->name, *name = event->len ? event->name : "";
    bool is_directory = recursive && event->mask & IN_ISDIR && event->len;
    char path[2 * MAX_PATH];
    snprintf(path, sizeof path, "%s%s%s", directory, *directory ? "/" : "", name);
    emit(kind, directory, name);
    if (moving.cookie || is_directory)
        follow_move(event, is_directory ? path : NULL);
    if (!is_directory)
        return;
    if (event->mask & (IN_CREATE | IN_MOVED_TO)) {
        int fd = openat(top, path, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (fd >= 0) {
            add_directory(fd, path, event->mask & IN_CREATE, 1);
            close(fd);
        }
    }
}

_Noreturn void file_watch(const struct path_args *args)
{
    static _Alignas(struct inotify_event) char buffer[65536];
    recursive = args->recursive;
    table = map_alloc(WATCHES * sizeof *table);
    names = map_alloc(NAME_BYTES);
    notify_fd = inotify_init1(IN_CLOEXEC);
    int top = open_in_root(absolute_path(args->path), O_PATH, 0);
    struct stat st;
    if (!table || !names || notify_fd < 0 || top < 0 || fstat(top, &st) < 0)
        child_fail_errno(errno, "cannot watch", args->path);
    if (S_ISDIR(st.st_mode)) {
        root_wd = add_directory(top, "", false, 0);
    } else {
        const char *name;
        int parent = open_parent(args->path, &name, false, 0);
        root_wd = fchdir(parent) < 0 ? -1 : inotify_add_watch(notify_fd, name, WATCH_MASK);
        if (root_wd > 0)
            remember(root_wd, "");
    }
    if (root_wd < 0)
        child_fail_errno(errno, "cannot watch", args->path);
    child_send(REPORT_READY, NULL, 0, -1);
    for (;;) {
        ssize_t n = read(notify_fd, buffer, sizeof buffer);
        if (n < 0 && errno != EINTR)
            child_fail_errno(errno, "cannot watch", args->path);
        for (char *p = buffer; n > 0 && p < buffer + n;) {
            const struct inotify_event *event = (const void *)p;
            handle(event, top);
            p += sizeof *event + event->len;
        }
    }
}
