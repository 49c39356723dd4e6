#include "file_tree.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "loop.h"

#define DEEP 100 /* directories open at a time */
#define LISTING_BYTES (MAX_FRAME + 65536u)

static bool is_dots(const char *name)
{
    return name[0] == '.' && (!name[1] || (name[1] == '.' && !name[2]));
}

static DIR *open_directory(int parent, const char *name)
{
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    if (fd >= 0 && !dir)
        close(fd);
    return dir;
}

/* --- remove --------------------------------------------------------------------------------- */

static int empty_directory(int top, DIR *dir, int depth, bool *moved);

static int remove_entry(int top, int dir, const char *name, int depth, bool *moved)
{
    static unsigned counter;
    char lifted[48];
    if (unlinkat(dir, name, 0) == 0)
        return 0;
    if (errno != EISDIR && errno != EPERM)
        return errno == ENOENT ? 0 : -1;
    if (unlinkat(dir, name, AT_REMOVEDIR) == 0)
        return 0;
    if (errno != ENOTEMPTY && errno != EEXIST)
        return -1;
    if (depth == DEEP) {
        /* Trees deeper than descriptors go: bring the rest up and come back for it. */
        snprintf(lifted, sizeof lifted, ".dsec-removed-%d-%u", (int)getpid(), counter++);
        *moved = true;
        return renameat(dir, name, top, lifted);
    }
    DIR *sub = open_directory(dir, name);
    if (!sub)
        return -1;
    int result = empty_directory(top, sub, depth + 1, moved);
    int err = errno;
    closedir(sub);
    errno = err;
    return result < 0 ? -1 : unlinkat(dir, name, AT_REMOVEDIR);
}

static int empty_directory(int top, DIR *dir, int depth, bool *moved)
{
    /* Entries removed while reading may hide others: read again until nothing is left. */
    for (int n = 1; n;) {
        n = 0;
        rewinddir(dir);
        for (struct dirent *d; (d = readdir(dir));) {
            if (is_dots(d->d_name))
                continue;
            if (remove_entry(top, dirfd(dir), d->d_name, depth, moved) < 0)
                return -1;
            n++;
        }
    }
    return 0;
}

int tree_remove(int parent, const char *name)
{
    DIR *dir = open_directory(parent, name);
    if (!dir)
        return -1;
    bool moved = false;
    int result = empty_directory(dirfd(dir), dir, 0, &moved);
    int err = errno;
    closedir(dir);
    errno = err;
    return result;
}

/* --- change --------------------------------------------------------------------------------- */

static int change_one(int dir, const char *name, const struct tree_change *change, int flags)
{
    if (change->chown)
        return fchownat(dir, name, change->uid, change->gid, flags);
    return fchmodat(dir, name, change->mode, 0);
}

static int change_below(DIR *dir, const struct tree_change *change, int depth)
{
    for (struct dirent *d; (d = readdir(dir));) {
        struct stat st;
        if (is_dots(d->d_name) || fstatat(dirfd(dir), d->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0)
            continue;
        if (S_ISLNK(st.st_mode) && !change->chown)
            continue;
        /* Below first: a mode may take our own right to enter. */
        if (S_ISDIR(st.st_mode)) {
            DIR *sub = depth < 8 * DEEP ? open_directory(dirfd(dir), d->d_name) : NULL;
            int result = sub ? change_below(sub, change, depth + 1) : -1;
            int err = errno;
            if (sub)
                closedir(sub);
            errno = err;
            if (result < 0)
                return -1;
        }
        if (change_one(dirfd(dir), d->d_name, change, AT_SYMLINK_NOFOLLOW) < 0)
            return -1;
    }
    return 0;
}

int tree_change(int parent, const char *name, const struct tree_change *change, bool recursive)
{
    DIR *dir = recursive ? open_directory(parent, name) : NULL;
    if (recursive && !dir && errno != ENOTDIR && errno != ELOOP)
        return -1;
    if (dir && change_below(dir, change, 0) < 0)
        return -1;
    return change_one(parent, name, change, 0);
}

/* --- list ----------------------------------------------------------------------------------- */

void listing_open(struct listing *list)
{
    *list = (struct listing){ .room = map_alloc(LISTING_BYTES) };
    if (!list->room)
        child_fail_errno(ENOMEM, "cannot list", (struct mp_bytes){ 0 });
    list->w = mp_writer_of(list->room, LISTING_BYTES);
    list->w.p += 5; /* an array32 head, filled in at the end */
}

_Noreturn void listing_send(struct listing *list)
{
    size_t n = mp_written(&list->w);
    if (list->w.overflow || n > MAX_FRAME - 64)
        child_fail(EXHAUSTED, "the list is larger than a frame of %u bytes", MAX_FRAME);
    list->room[0] = 0xdd;
    for (int i = 0; i < 4; i++)
        list->room[1 + i] = (uint8_t)(list->count >> (24 - 8 * i));
    if (n <= INLINE_BYTES)
        child_result(list->room, n);
    if (!write_all(OUT_FD, list->room, n))
        _exit(127);
    child_send(REPORT_BULK, NULL, 0, -1);
    _exit(0);
}

static void list_below(struct listing *list, DIR *dir, const char *prefix, bool recursive, int depth)
{
    char name[MAX_PATH];
    for (struct dirent *d; (d = readdir(dir)) && !list->w.overflow;) {
        struct stat st;
        if (is_dots(d->d_name) || fstatat(dirfd(dir), d->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0)
            continue;
        int n = snprintf(name, sizeof name, "%s%s%s", prefix, *prefix ? "/" : "", d->d_name);
        if (n >= (int)sizeof name)
            continue;
        put_stat(&list->w, text_bytes(name), dirfd(dir), d->d_name, &st);
        list->count++;
        if (!recursive || !S_ISDIR(st.st_mode) || depth == DEEP)
            continue;
        DIR *sub = open_directory(dirfd(dir), d->d_name);
        if (sub) {
            list_below(list, sub, name, true, depth + 1);
            closedir(sub);
        }
    }
}

_Noreturn void file_list(const struct path_args *args)
{
    struct listing list;
    int fd = open_in_root(absolute_path(args->path), O_RDONLY | O_DIRECTORY, 0);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    if (!dir)
        child_fail_errno(errno, "cannot list", args->path);
    listing_open(&list);
    list_below(&list, dir, "", args->recursive, 0);
    listing_send(&list);
}
