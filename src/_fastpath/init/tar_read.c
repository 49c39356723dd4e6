/* files.upload: unpack a tar stream below a directory. Reads ustar, pax and GNU long names. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "files.h"
#include "loop.h"
#include "tar.h"

#define LONG_FIELD (64u << 10)
#define PAX_MAX (1u << 20)
#define COPY_BYTES (256u << 10)

struct entry {
    char name[LONG_FIELD], link[LONG_FIELD];
    uint64_t size;
    uint32_t mode, uid, gid;
    struct timespec mtime;
    char type;
    bool has_name, has_link, has_size, has_mtime, has_uid, has_gid; /* by an extension header */
};

/* Directories get their mode and time when nothing is put into them any more. */
struct pending {
    struct pending *next;
    uint32_t mode, uid, gid;
    struct timespec mtime;
    char name[];
};

static int top; /* the destination */
static struct pending *directories;
static uint64_t taken, skipped;
static uint8_t *copy;
static bool owner_kept;

static _Noreturn void broken(const char *what)
{
    child_fail(INVALID_ARGUMENT, "the archive is broken: %s", what);
}

/* The caller went away in the middle: there is nobody to tell. */
static void take(void *data, size_t n)
{
    if (read_all(IN_FD, data, n) != 1) {
        if (!stream_was_committed())
            _exit(1);
        broken("it ends too early");
    }
    taken += n;
}

static void skip(uint64_t n)
{
    while (n) {
        size_t part = n < COPY_BYTES ? (size_t)n : COPY_BYTES;
        take(copy, part);
        n -= part;
    }
}

static uint64_t padded(uint64_t n)
{
    return (n + TAR_BLOCK - 1) & ~(uint64_t)(TAR_BLOCK - 1);
}

/* Octal, or base 256 when the first bit is set (GNU and star for large values). */
static uint64_t number(const char *field, size_t width)
{
    const uint8_t *p = (const uint8_t *)field;
    uint64_t value = 0;
    size_t i = 0;
    if (p[0] & 0x80) {
        for (value = p[0] & 0x3f, i = 1; i < width; i++)
            value = value << 8 | p[i];
        return value;
    }
    while (i < width && p[i] == ' ')
        i++;
    for (; i < width && p[i] >= '0' && p[i] <= '7'; i++)
        value = value << 3 | (uint64_t)(p[i] - '0');
    return value;
}

static uint64_t decimal(const char *p, const char *end, long *nanoseconds)
{
    uint64_t value = 0;
    long scale = 100000000;
    for (; p < end && *p >= '0' && *p <= '9'; p++)
        value = value * 10 + (uint64_t)(*p - '0');
    if (nanoseconds && p < end && *p == '.')
        for (p++; p < end && *p >= '0' && *p <= '9'; p++, scale /= 10)
            *nanoseconds += scale * (*p - '0');
    return value;
}

static void set_text(char *to, bool *has, const char *p, size_t n)
{
    if (n >= LONG_FIELD)
        broken("a name is longer than 64 KiB");
    if (memchr(p, 0, n))
        n = strnlen(p, n);
    memcpy(to, p, n);
    to[n] = 0;
    *has = true;
}

static void pax_value(struct entry *e, const char *key, size_t key_n, const char *p,
                      const char *end)
{
    size_t n = (size_t)(end - p);
    if (key_n == 4 && memcmp(key, "path", 4) == 0)
        set_text(e->name, &e->has_name, p, n);
    else if (key_n == 8 && memcmp(key, "linkpath", 8) == 0)
        set_text(e->link, &e->has_link, p, n);
    else if (key_n == 4 && memcmp(key, "size", 4) == 0)
        e->size = decimal(p, end, NULL), e->has_size = true;
    else if (key_n == 3 && memcmp(key, "uid", 3) == 0)
        e->uid = (uint32_t)decimal(p, end, NULL), e->has_uid = true;
    else if (key_n == 3 && memcmp(key, "gid", 3) == 0)
        e->gid = (uint32_t)decimal(p, end, NULL), e->has_gid = true;
    else if (key_n == 5 && memcmp(key, "mtime", 5) == 0 && n && *p != '-') {
        e->mtime.tv_nsec = 0;
        e->mtime.tv_sec = (time_t)decimal(p, end, &e->mtime.tv_nsec);
        e->has_mtime = true;
    }
}

static void read_pax(struct entry *e, uint64_t size)
{
    if (size > PAX_MAX)
        broken("an extended header is larger than 1 MiB");
    char *text = map_alloc((size_t)padded(size) + 1);
    if (!text)
        child_fail_errno(ENOMEM, "cannot unpack", (struct mp_bytes){ 0 });
    take(text, (size_t)padded(size));
    for (char *p = text, *end = text + size; p < end;) {
        char *space = memchr(p, ' ', (size_t)(end - p));
        uint64_t n = space ? decimal(p, space, NULL) : 0;
        if (!space || n > (uint64_t)(end - p) || p + n <= space + 1)
            broken("an extended header has a false length");
        char *equals = memchr(space + 1, '=', (size_t)(p + n - space - 1));
        if (!equals)
            broken("an extended header has no value");
        pax_value(e, space + 1, (size_t)(equals - space - 1), equals + 1, p + n - 1);
        p += n;
    }
    map_free(text, (size_t)padded(size) + 1);
}

static void read_long(char *to, bool *has, uint64_t size)
{
    if (size >= LONG_FIELD)
        broken("a name is longer than 64 KiB");
    char *text = map_alloc(2 * LONG_FIELD);
    if (!text)
        child_fail_errno(ENOMEM, "cannot unpack", (struct mp_bytes){ 0 });
    take(text, (size_t)padded(size));
    set_text(to, has, text, (size_t)size);
    map_free(text, 2 * LONG_FIELD);
}

static void fill_names(struct entry *e, const struct tar_header *h)
{
    if (!e->has_name) {
        bool ustar = memcmp(h->magic, "ustar\0", 6) == 0; /* GNU's old magic has no prefix */
        int prefix = ustar ? (int)strnlen(h->prefix, sizeof h->prefix) : 0;
        snprintf(e->name, LONG_FIELD, "%.*s%s%.*s", prefix, h->prefix, prefix ? "/" : "",
                 (int)strnlen(h->name, sizeof h->name), h->name);
    }
    if (!e->has_link)
        snprintf(e->link, LONG_FIELD, "%.*s", (int)strnlen(h->link, sizeof h->link), h->link);
}

/* The next entry with its extension headers applied; false at the end of the archive. */
static bool next_entry(struct entry *e)
{
    struct tar_header h;
    e->has_name = e->has_link = e->has_size = e->has_mtime = e->has_uid = e->has_gid = false;
    for (;;) {
        take(&h, sizeof h);
        if (!h.name[0] && tar_checksum(&h) == 8 * ' ')
            return false;
        if (number(h.checksum, sizeof h.checksum) != tar_checksum(&h))
            broken("a header's checksum is wrong");
        uint64_t size = number(h.size, sizeof h.size);
        if (h.type == 'x') {
            read_pax(e, size);
        } else if (h.type == 'L') {
            read_long(e->name, &e->has_name, size);
        } else if (h.type == 'K') {
            read_long(e->link, &e->has_link, size);
        } else if (h.type == 'g') {
            skip(padded(size));
        } else {
            e->size = e->has_size ? e->size : size;
            break;
        }
    }
    fill_names(e, &h);
    e->type = h.type;
    e->mode = (uint32_t)number(h.mode, sizeof h.mode) & 07777;
    if (!e->has_uid)
        e->uid = (uint32_t)number(h.uid, sizeof h.uid);
    if (!e->has_gid)
        e->gid = (uint32_t)number(h.gid, sizeof h.gid);
    if (!e->has_mtime)
        e->mtime = (struct timespec){ .tv_sec = (time_t)number(h.mtime, sizeof h.mtime) };
    return true;
}

/* Make a name relative and plain in place: no leading "/", no "." parts; ".." is refused. */
static void plain_name(char *name)
{
    char *out = name;
    for (char *p = name; *p;) {
        size_t n = strcspn(p, "/");
        if (n == 2 && p[0] == '.' && p[1] == '.')
            child_fail(INVALID_ARGUMENT, "the archive names a path outside of it: %.150s", name);
        if (n && !(n == 1 && *p == '.')) {
            if (out != name)
                *out++ = '/';
            memmove(out, p, n);
            out += n;
        }
        p += n + (p[n] == '/');
    }
    *out = 0;
}

static int open_beneath(const char *path)
{
    struct {
        uint64_t flags, mode, resolve;
    } how = { .flags = O_PATH | O_DIRECTORY | O_CLOEXEC,
              .resolve = 0x08 /* RESOLVE_BENEATH */ | 0x02 /* RESOLVE_NO_MAGICLINKS */ };
    return (int)syscall(SYS_openat2, top, *path ? path : ".", &how, sizeof how);
}

/* Make directory `path` (the parts of it that are missing) below `top`; false and errno. */
static bool make_path(char *path)
{
    for (char *p = path;; p++) {
        p += strcspn(p, "/");
        char after = *p;
        *p = 0;
        char *cut = strrchr(path, '/');
        if (cut)
            *cut = 0;
        int up = open_beneath(cut ? path : "");
        if (cut)
            *cut = '/';
        bool made = up >= 0 && (mkdirat(up, cut ? cut + 1 : path, 0755) == 0 || errno == EEXIST);
        int err = errno;
        if (up >= 0)
            close(up);
        *p = after;
        errno = err;
        if (!made || !after)
            return made;
    }
}

/* The directory that holds `name`, made where it is missing; links out of `top` are refused. */
static int parent_of(char *name, const char **last)
{
    char *slash = strrchr(name, '/');
    *last = slash ? slash + 1 : name;
    if (!slash)
        return open_beneath("");
    *slash = 0;
    int fd = open_beneath(name);
    if (fd < 0 && errno == ENOENT && make_path(name))
        fd = open_beneath(name);
    *slash = '/';
    return fd;
}

static _Noreturn void failed(const struct entry *e)
{
    if (errno == EXDEV)
        child_fail(INVALID_ARGUMENT, "a link leads the archive outside: %.150s", e->name);
    child_fail_errno(errno, "cannot unpack", text_bytes(e->name));
}

static void keep_times(int dir, const char *name, const struct entry *e, int flags)
{
    struct timespec times[2] = { e->mtime, e->mtime };
    utimensat(dir, name, times, flags);
}

static void make_file(int dir, const char *name, const struct entry *e)
{
    if (unlinkat(dir, name, 0) < 0 && errno != ENOENT)
        failed(e);
    int fd = openat(dir, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0)
        failed(e);
    for (uint64_t left = e->size; left;) {
        size_t part = left < COPY_BYTES ? (size_t)left : COPY_BYTES;
        take(copy, part);
        if (!write_all(fd, copy, part))
            failed(e);
        left -= part;
    }
    skip(padded(e->size) - e->size);
    if (owner_kept && fchown(fd, e->uid, e->gid) < 0 && errno != EPERM && errno != EINVAL)
        failed(e);
    struct timespec times[2] = { e->mtime, e->mtime };
    if (fchmod(fd, e->mode) < 0 || futimens(fd, times) < 0 || close(fd) < 0)
        failed(e);
}

static void make_directory(int dir, const char *name, const struct entry *e)
{
    struct stat st;
    if (mkdirat(dir, name, 0755) < 0 &&
        (errno != EEXIST || fstatat(dir, name, &st, 0) < 0 || !S_ISDIR(st.st_mode)))
        failed(e);
    size_t n = strlen(e->name) + 1;
    struct pending *p = map_alloc(sizeof *p + n);
    if (!p)
        return;
    *p = (struct pending){ directories, e->mode, e->uid, e->gid, e->mtime };
    memcpy(p->name, e->name, n);
    directories = p;
}

static void make_link(int dir, const char *name, struct entry *e)
{
    if (unlinkat(dir, name, 0) < 0 && errno != ENOENT)
        failed(e);
    if (e->type == '2') {
        if (symlinkat(e->link, dir, name) < 0)
            failed(e);
        if (owner_kept)
            (void)!fchownat(dir, name, e->uid, e->gid, AT_SYMLINK_NOFOLLOW);
        keep_times(dir, name, e, AT_SYMLINK_NOFOLLOW);
        return;
    }
    const char *source;
    plain_name(e->link);
    int from = parent_of(e->link, &source);
    if (from < 0 || linkat(from, source, dir, name, 0) < 0)
        failed(e);
    close(from);
}

static void unpack(struct entry *e)
{
    bool known = e->type == '0' || !e->type || e->type == '7' || e->type == '5' ||
                 e->type == '1' || e->type == '2';
    bool file = e->type == '0' || !e->type || e->type == '7';
    size_t n = strlen(e->name);
    bool directory = e->type == '5' || (file && n && e->name[n - 1] == '/');
    plain_name(e->name);
    if (!known || !*e->name) {
        skipped += !known;
        skip(padded(e->size));
        return;
    }
    const char *name;
    int dir = parent_of(e->name, &name);
    if (dir < 0)
        failed(e);
    if (directory)
        make_directory(dir, name, e);
    else if (file)
        make_file(dir, name, e);
    else
        make_link(dir, name, e);
    if (!file || directory)
        skip(padded(e->size));
    close(dir);
}

static void finish_directories(void)
{
    for (struct pending *p = directories; p; p = p->next) {
        const char *name;
        struct timespec times[2] = { p->mtime, p->mtime };
        int dir = parent_of(p->name, &name);
        if (dir < 0)
            continue;
        if (owner_kept)
            (void)!fchownat(dir, name, p->uid, p->gid, AT_SYMLINK_NOFOLLOW);
        (void)!fchmodat(dir, name, p->mode, 0);
        utimensat(dir, name, times, AT_SYMLINK_NOFOLLOW);
        close(dir);
    }
}

_Noreturn void tar_upload(const struct path_args *args)
{
    static struct entry entry;
    static char path[MAX_PATH + 8];
    const char *name;
    uint8_t room[64];
    copy = map_alloc(COPY_BYTES);
    if (!copy)
        child_fail_errno(ENOMEM, "cannot unpack", args->path);
    owner_kept = geteuid() == 0;
    snprintf(path, sizeof path, "%.*s/x", (int)args->path.n, args->path.p);
    top = open_parent(text_bytes(path), &name, true, 0755);
    while (next_entry(&entry))
        unpack(&entry);
    for (ssize_t n; (n = read(IN_FD, copy, COPY_BYTES)) != 0;)
        if (n < 0 && errno != EINTR)
            break; /* padding behind the end */
        else if (n > 0)
            taken += (uint64_t)n;
    finish_directories();
    if (!stream_was_committed())
        _exit(1);
    struct mp_writer w = mp_writer_of(room, sizeof room);
    mp_put_map(&w, 2);
    mp_put_text(&w, "size");
    mp_put_u64(&w, taken);
    mp_put_text(&w, "skipped"); /* devices and FIFOs */
    mp_put_u64(&w, skipped);
    child_result(room, mp_written(&w));
}
