/* files.download: a tree as a tar stream. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "files.h"
#include "loop.h"
#include "tar.h"

#define TAR_DEPTH 500
#define TAR_PATH (64u << 10)

/* Write the header of an entry, with a pax header before it for what ustar cannot hold. */
static void put_entry(const char *name, const struct stat *st, char type, const char *link)
{
    static char pax[2 * TAR_PATH + 1024];
    struct tar_header h = { .type = type };
    size_t name_n = strlen(name), link_n = link ? strlen(link) : 0, pax_n = 0;
    uint64_t size = type == '0' ? (uint64_t)st->st_size : 0;
    uint64_t mtime = st->st_mtim.tv_sec > 0 ? (uint64_t)st->st_mtim.tv_sec : 0;
    if (name_n > sizeof h.name)
        pax_n += tar_record(pax + pax_n, "path", name, name_n);
    if (link_n > sizeof h.link)
        pax_n += tar_record(pax + pax_n, "linkpath", link, link_n);
    if (size >> 33)
        pax_n += tar_record_number(pax + pax_n, "size", size);
    if (st->st_uid >> 21)
        pax_n += tar_record_number(pax + pax_n, "uid", st->st_uid);
    if (st->st_gid >> 21)
        pax_n += tar_record_number(pax + pax_n, "gid", st->st_gid);
    if (pax_n)
        tar_put_pax(pax, pax_n);
    memcpy(h.name, name, name_n < sizeof h.name ? name_n : sizeof h.name);
    memcpy(h.link, link ? link : "", link_n < sizeof h.link ? link_n : sizeof h.link);
    tar_octal(h.mode, 8, st->st_mode & 07777);
    tar_octal(h.uid, 8, st->st_uid >> 21 ? 0 : st->st_uid);
    tar_octal(h.gid, 8, st->st_gid >> 21 ? 0 : st->st_gid);
    tar_octal(h.size, 12, size >> 33 ? 0 : size);
    tar_octal(h.mtime, 12, mtime);
    tar_put_header(&h);
}

static void put_file(int dir, const char *entry, const char *name, struct stat *st)
{
    const char *earlier = st->st_nlink > 1 ? tar_earlier_name(st, name) : NULL;
    if (earlier) {
        put_entry(name, st, '1', earlier);
        return;
    }
    int fd = openat(dir, entry, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT)
        return; /* removed while we walked */
    if (fd < 0 || fstat(fd, st) < 0)
        child_fail_errno(errno, "cannot read", text_bytes(name));
    put_entry(name, st, '0', NULL);
    if (!tar_put_content(fd, (uint64_t)st->st_size))
        child_fail_errno(errno, "cannot read", text_bytes(name));
    tar_pad((uint64_t)st->st_size);
    close(fd);
}

static void put_tree(DIR *dir, char *name, size_t name_n, int depth);

static void put_any(int dir, const char *entry, char *name, size_t name_n, int depth)
{
    struct stat st;
    char target[MAX_PATH];
    if (fstatat(dir, entry, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return;
    if (S_ISREG(st.st_mode)) {
        put_file(dir, entry, name, &st);
    } else if (S_ISLNK(st.st_mode)) {
        ssize_t n = readlinkat(dir, entry, target, sizeof target - 1);
        if (n < 0)
            return;
        target[n] = 0;
        put_entry(name, &st, '2', target);
    } else if (S_ISDIR(st.st_mode)) {
        int fd = openat(dir, entry, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        DIR *sub = fd < 0 ? NULL : fdopendir(fd);
        if (!sub && errno == ENOENT)
            return;
        if (!sub || depth == TAR_DEPTH)
            child_fail_errno(sub ? ENAMETOOLONG : errno, "cannot enter", text_bytes(name));
        name[name_n] = '/';
        name[name_n + 1] = 0;
        put_entry(name, &st, '5', NULL);
        put_tree(sub, name, name_n + 1, depth + 1);
        closedir(sub);
    } /* devices, FIFOs and sockets mean nothing elsewhere */
}

static void put_tree(DIR *dir, char *name, size_t name_n, int depth)
{
    for (struct dirent *d; (d = readdir(dir));) {
        size_t n = strlen(d->d_name);
        if (strcmp(d->d_name, ".") == 0 || strcmp(d->d_name, "..") == 0)
            continue;
        if (name_n + n + 2 > TAR_PATH)
            child_fail_errno(ENAMETOOLONG, "cannot enter", text_bytes(d->d_name));
        memcpy(name + name_n, d->d_name, n + 1);
        put_any(dirfd(dir), d->d_name, name, name_n + n, depth);
    }
}

_Noreturn void tar_download(const struct path_args *args)
{
    static char name[TAR_PATH + 2];
    if (!tar_begin())
        child_fail_errno(ENOMEM, "cannot pack", args->path);
    int fd = open_in_root(absolute_path(args->path), O_RDONLY | O_DIRECTORY, 0);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    if (!dir && errno != ENOTDIR)
        child_fail_errno(errno, "cannot open", args->path);
    if (dir) {
        put_tree(dir, name, 0, 0);
    } else { /* a single file: an archive of that one entry */
        const char *entry;
        int parent = open_parent(args->path, &entry, false, 0);
        snprintf(name, sizeof name, "%s", entry);
        put_any(parent, entry, name, strlen(name), 0);
    }
    transferred(tar_end());
}
