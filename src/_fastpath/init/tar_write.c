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
#define LINKS 65536
#define LINK_BYTES (16u << 20)
#define BUFFER_BYTES (256u << 10)
#define TAR_PATH (64u << 10)

static uint64_t sent;
static uint8_t *buffer;
static size_t buffered;

struct seen { /* a file with several names, by device and inode */
    uint64_t dev, ino;
    uint32_t name;
    bool used;
};

static struct seen *links;
static char *link_names;
static size_t link_bytes, link_count;

static void flush(void)
{
    if (!write_all(OUT_FD, buffer, buffered))
        _exit(127);
    sent += buffered;
    buffered = 0;
}

static void put(const void *data, size_t n)
{
    const uint8_t *p = data;
    while (n) {
        size_t part = BUFFER_BYTES - buffered < n ? BUFFER_BYTES - buffered : n;
        if (p)
            memcpy(buffer + buffered, p, part);
        else
            memset(buffer + buffered, 0, part);
        p = p ? p + part : NULL;
        n -= part;
        buffered += part;
        if (buffered == BUFFER_BYTES)
            flush();
    }
}

static void pad(uint64_t size)
{
    put(NULL, (size_t)(-size & (TAR_BLOCK - 1)));
}

static void octal(char *field, int width, uint64_t value)
{
    for (int i = width - 2; i >= 0; i--, value >>= 3)
        field[i] = (char)('0' + (value & 7));
}

static void put_header(struct tar_header *h)
{
    char text[8];
    memcpy(h->magic, "ustar", 6);
    memcpy(h->version, "00", 2);
    snprintf(text, sizeof text, "%06o", tar_checksum(h));
    memcpy(h->checksum, text, 7);
    h->checksum[7] = ' ';
    put(h, sizeof *h);
}

/* One pax record: its own length in decimal, counted into itself. */
static size_t pax_record(char *out, const char *key, const char *value, size_t n)
{
    size_t body = strlen(key) + n + 3, digits = 1;
    for (size_t limit = 10; body + digits >= limit; limit *= 10)
        digits++;
    int head = sprintf(out, "%zu %s=", body + digits, key);
    memcpy(out + head, value, n);
    out[(size_t)head + n] = '\n';
    return (size_t)head + n + 1;
}

static size_t pax_number(char *out, const char *key, uint64_t value)
{
    char text[24];
    int n = snprintf(text, sizeof text, "%llu", (unsigned long long)value);
    return pax_record(out, key, text, (size_t)n);
}

/* Write the header of an entry, with a pax header before it for what ustar cannot hold. */
static void put_entry(const char *name, const struct stat *st, char type, const char *link)
{
    static char pax[2 * TAR_PATH + 1024];
    struct tar_header h = { .type = type };
    size_t name_n = strlen(name), link_n = link ? strlen(link) : 0, pax_n = 0;
    uint64_t size = type == '0' ? (uint64_t)st->st_size : 0;
    uint64_t mtime = st->st_mtim.tv_sec > 0 ? (uint64_t)st->st_mtim.tv_sec : 0;
    if (name_n > sizeof h.name)
        pax_n += pax_record(pax + pax_n, "path", name, name_n);
    if (link_n > sizeof h.link)
        pax_n += pax_record(pax + pax_n, "linkpath", link, link_n);
    if (size >> 33)
        pax_n += pax_number(pax + pax_n, "size", size);
    if (st->st_uid >> 21)
        pax_n += pax_number(pax + pax_n, "uid", st->st_uid);
    if (st->st_gid >> 21)
        pax_n += pax_number(pax + pax_n, "gid", st->st_gid);
    if (pax_n) {
        struct tar_header x = { .type = 'x' };
        strcpy(x.name, "././@PaxHeader");
        octal(x.mode, 8, 0644);
        octal(x.uid, 8, 0);
        octal(x.gid, 8, 0);
        octal(x.size, 12, pax_n);
        octal(x.mtime, 12, 0);
        put_header(&x);
        put(pax, pax_n);
        pad(pax_n);
    }
    memcpy(h.name, name, name_n < sizeof h.name ? name_n : sizeof h.name);
    memcpy(h.link, link ? link : "", link_n < sizeof h.link ? link_n : sizeof h.link);
    octal(h.mode, 8, st->st_mode & 07777);
    octal(h.uid, 8, st->st_uid >> 21 ? 0 : st->st_uid);
    octal(h.gid, 8, st->st_gid >> 21 ? 0 : st->st_gid);
    octal(h.size, 12, size >> 33 ? 0 : size);
    octal(h.mtime, 12, mtime);
    put_header(&h);
}

/* The first name under which a file with several was sent; NULL: this is the first. */
static const char *earlier_name(const struct stat *st, const char *name)
{
    size_t n = strlen(name) + 1;
    for (uint64_t i = st->st_ino * 0x9e3779b97f4a7c15u >> 48, k = 0; k < LINKS; i++, k++) {
        struct seen *s = &links[i % LINKS];
        if (s->used && s->dev == st->st_dev && s->ino == st->st_ino)
            return link_names + s->name;
        if (s->used)
            continue;
        if (link_count < LINKS / 2 && link_bytes + n <= LINK_BYTES) {
            *s = (struct seen){ st->st_dev, st->st_ino, (uint32_t)link_bytes, true };
            memcpy(link_names + link_bytes, name, n);
            link_bytes += n;
            link_count++;
        }
        return NULL;
    }
    return NULL;
}

static void put_file(int dir, const char *entry, const char *name, struct stat *st)
{
    const char *earlier = st->st_nlink > 1 ? earlier_name(st, name) : NULL;
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
    uint64_t left = (uint64_t)st->st_size;
    while (left) {
        if (buffered == BUFFER_BYTES)
            flush();
        size_t room = BUFFER_BYTES - buffered;
        ssize_t n = read(fd, buffer + buffered, room < left ? room : (size_t)left);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            child_fail_errno(errno, "cannot read", text_bytes(name));
        if (n == 0) { /* it shrank: the header's size is a promise */
            for (; left; left -= left < 65536 ? left : 65536)
                put(NULL, left < 65536 ? (size_t)left : 65536);
            break;
        }
        buffered += (size_t)n;
        left -= (uint64_t)n;
    }
    if (buffered == BUFFER_BYTES)
        flush();
    pad((uint64_t)st->st_size);
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
    buffer = map_alloc(BUFFER_BYTES);
    links = map_alloc(LINKS * sizeof *links);
    link_names = map_alloc(LINK_BYTES);
    if (!buffer || !links || !link_names)
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
    put(NULL, 2 * TAR_BLOCK);
    flush();
    transferred(sent);
}
