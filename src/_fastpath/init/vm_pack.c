/* vm.pack: what the machine changed, the overlay's upper as it is, as a tar stream.
 *
 * A child of ours reads it as the machine's root, past whatever is mounted over it. Commands stand still
 * meanwhile. The freeze is dsec-init's, so that it ends with the call, however that ends. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "config.h"
#include "files.h"
#include "loop.h"
#include "tar.h"
#include "transfer.h"
#include "vm.h"

#define CGROUP_DIR (CTL_FD + 1)
#define UPPER_DIR (CTL_FD + 2)
#define UPPER "u"
#define DEPTH 512
#define TREE_PATH (64u << 10)
#define ATTRIBUTES (64u << 10) /* bytes of names, and of one value */
#define ATTRIBUTE_NAME 256 /* with its end, XATTR_NAME_MAX */
#define PAX_BYTES (1u << 20) /* what readers take */
#define SEGMENTS 16384 /* a file in more pieces is sent with the holes between the last ones */
#define FREEZE_US 10000000
#define FREEZE_POLL_US 1000

struct segment {
    uint64_t start, size;
};

static struct segment *segments;
static char *pax, *names, *value;
static size_t pax_n;
static uint64_t sockets;

/* --- in dsec-init --------------------------------------------------------------------------- */

static bool frozen;

static int write_freeze(const char *text)
{
    int fd = openat(FD_CGROUP, "cgroup.freeze", O_WRONLY | O_CLOEXEC);
    int error = fd < 0 || write(fd, text, 1) != 1 ? -errno : 0;
    if (fd >= 0)
        close(fd);
    return error;
}

void vm_thaw(void)
{
    frozen = false;
    write_freeze("0");
}

void vm_pack(struct call *call, struct mp_bytes raw)
{
    static const struct path_args none;
    const char *problem = args_nothing(raw);
    if (problem) {
        call_fail(call, "invalid_argument", "%s", problem);
        return;
    }
    if (frozen) {
        call_fail(call, "wrong_state", "the machine is being packed by another call");
        return;
    }
    int error = write_freeze("1");
    if (error) {
        call_fail(call, "internal", "the commands cannot be frozen: %s", strerror(-error));
        return;
    }
    frozen = true;
    if (!transfer_start(call, FILE_PACK, &none))
        vm_thaw();
}

/* --- in the child --------------------------------------------------------------------------- */

static struct mp_bytes nothing(void)
{
    return (struct mp_bytes){ 0 };
}

/* Commands may be in the middle of a system call. */
static void wait_for_freeze(void)
{
    char text[256];
    for (uint64_t until = now_us() + FREEZE_US;; usleep(FREEZE_POLL_US)) {
        int fd = openat(CGROUP_DIR, "cgroup.events", O_RDONLY | O_CLOEXEC);
        ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
        if (n < 0)
            child_fail_errno(errno, "cannot see whether the commands are frozen", nothing());
        close(fd);
        text[n] = 0;
        if (strstr(text, "frozen 1"))
            return;
        if (now_us() > until)
            child_fail(WRONG_STATE, "the commands did not stand still within %u s", FREEZE_US / 1000000);
    }
}

static void add_record(const char *name, const char *key, const char *text, size_t n)
{
    if (pax_n + strlen(key) + n + 32 > PAX_BYTES)
        child_fail_errno(E2BIG, "too long a name, or attributes too large, to pack", text_bytes(name));
    pax_n += tar_record(pax + pax_n, key, text, n);
}

static void add_number(const char *name, const char *key, uint64_t number)
{
    char text[24];
    add_record(name, key, text, (size_t)snprintf(text, sizeof text, "%llu", (unsigned long long)number));
}

/* The key of an attribute's record as GNU tar writes it, which ends at the first "=". */
static void attribute_key(char *out, const char *attribute)
{
    out += sprintf(out, "SCHILY.xattr.");
    for (; *attribute; attribute++)
        out += *attribute == '=' || *attribute == '%' ? sprintf(out, "%%%02X", *attribute)
                                                     : sprintf(out, "%c", *attribute);
}

static void add_attributes(int dir, const char *entry, const char *name)
{
    char key[16 + 3 * ATTRIBUTE_NAME];
    /* There is no *at form of these. */
    ssize_t n = fchdir(dir) < 0 ? -1 : llistxattr(entry, names, ATTRIBUTES);
    if (n < 0 && errno != EOPNOTSUPP)
        child_fail_errno(errno, "cannot read the attributes of", text_bytes(name));
    for (ssize_t at = 0; at < n; at += (ssize_t)strlen(names + at) + 1) {
        ssize_t size = lgetxattr(entry, names + at, value, ATTRIBUTES);
        if (size < 0)
            child_fail_errno(errno, "cannot read the attributes of", text_bytes(name));
        attribute_key(key, names + at);
        add_record(name, key, value, (size_t)size);
    }
}

static void add_time(const char *name, const struct timespec *time)
{
    char text[48];
    int n = snprintf(text, sizeof text, "%lld.%09ld", (long long)time->tv_sec, time->tv_nsec);
    if (time->tv_sec >= 0)
        add_record(name, "mtime", text, (size_t)n);
}

/* Write the header of an entry of `size` bytes, after a pax header of what ustar cannot hold. */
static void put_entry(const char *name, const struct stat *st, char type, const char *link, uint64_t size)
{
    struct tar_header h = { .type = type };
    size_t name_n = strlen(name), link_n = link ? strlen(link) : 0;
    bool device = type == '3' || type == '4';
    if (name_n > sizeof h.name)
        add_record(name, "path", name, name_n);
    if (link_n > sizeof h.link)
        add_record(name, "linkpath", link, link_n);
    if (size >> 33)
        add_number(name, "size", size);
    if (st->st_uid >> 21)
        add_number(name, "uid", st->st_uid);
    if (st->st_gid >> 21)
        add_number(name, "gid", st->st_gid);
    add_time(name, &st->st_mtim);
    if (!S_ISDIR(st->st_mode) && st->st_nlink > 1)
        add_number(name, "DSEC.nlink", st->st_nlink);
    tar_put_pax(pax, pax_n);
    pax_n = 0;
    memcpy(h.name, name, name_n < sizeof h.name ? name_n : sizeof h.name);
    memcpy(h.link, link ? link : "", link_n < sizeof h.link ? link_n : sizeof h.link);
    tar_octal(h.mode, 8, st->st_mode & 07777);
    tar_octal(h.uid, 8, st->st_uid >> 21 ? 0 : st->st_uid);
    tar_octal(h.gid, 8, st->st_gid >> 21 ? 0 : st->st_gid);
    tar_octal(h.size, 12, size >> 33 ? 0 : size);
    tar_octal(h.mtime, 12, 0);
    tar_octal(h.major, 8, device ? major(st->st_rdev) : 0);
    tar_octal(h.minor, 8, device ? minor(st->st_rdev) : 0);
    tar_put_header(&h);
}

/* --- content -------------------------------------------------------------------------------- */

/* Where the file has data, in ascending order; how many pieces. */
static size_t find_segments(int fd, const char *name, uint64_t size)
{
    size_t n = 0;
    off_t end = 0;
    for (off_t start; (uint64_t)end < size; n++) {
        start = lseek(fd, end, SEEK_DATA);
        if (start < 0 && errno == ENXIO)
            break; /* a hole up to the end */
        end = start < 0 ? -1 : n == SEGMENTS - 1 ? (off_t)size : lseek(fd, start, SEEK_HOLE);
        if (end < 0)
            child_fail_errno(errno, "cannot read", text_bytes(name));
        if ((uint64_t)end > size)
            end = (off_t)size;
        segments[n] = (struct segment){ (uint64_t)start, (uint64_t)(end - start) };
    }
    return n;
}

/* GNU's sparse format 1.0: a map in decimal lines, padded to a block, in front of the data. */
static void put_sparse(int fd, const char *name, const struct stat *st, size_t count)
{
    char line[48];
    uint64_t map = (uint64_t)snprintf(line, sizeof line, "%zu\n", count), data = 0;
    for (size_t i = 0; i < count; i++) {
        map += (uint64_t)snprintf(line, sizeof line, "%llu\n%llu\n", (unsigned long long)segments[i].start,
                                  (unsigned long long)segments[i].size);
        data += segments[i].size;
    }
    add_number(name, "GNU.sparse.major", 1);
    add_number(name, "GNU.sparse.minor", 0);
    add_record(name, "GNU.sparse.name", name, strlen(name));
    add_number(name, "GNU.sparse.realsize", (uint64_t)st->st_size);
    put_entry(name, st, '0', NULL, map + (-map & (TAR_BLOCK - 1)) + data);
    tar_put(line, (size_t)snprintf(line, sizeof line, "%zu\n", count));
    for (size_t i = 0; i < count; i++)
        tar_put(line, (size_t)snprintf(line, sizeof line, "%llu\n%llu\n",
                                       (unsigned long long)segments[i].start,
                                       (unsigned long long)segments[i].size));
    tar_pad(map);
    for (size_t i = 0; i < count; i++)
        if (lseek(fd, (off_t)segments[i].start, SEEK_SET) < 0 || !tar_put_content(fd, segments[i].size))
            child_fail_errno(errno, "cannot read", text_bytes(name));
    tar_pad(data);
}

static void put_file(int dir, const char *entry, const char *name, struct stat *st)
{
    int fd = openat(dir, entry, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 || fstat(fd, st) < 0)
        child_fail_errno(errno, "cannot read", text_bytes(name));
    add_attributes(dir, entry, name);
    uint64_t size = (uint64_t)st->st_size;
    size_t count = find_segments(fd, name, size);
    if (size == 0 || (count == 1 && segments[0].size == size)) {
        put_entry(name, st, '0', NULL, size);
        if (lseek(fd, 0, SEEK_SET) < 0 || !tar_put_content(fd, size))
            child_fail_errno(errno, "cannot read", text_bytes(name));
        tar_pad(size);
    } else {
        put_sparse(fd, name, st, count);
    }
    close(fd);
}

static void put_link(int dir, const char *entry, const char *name, const struct stat *st)
{
    char target[MAX_PATH];
    ssize_t n = readlinkat(dir, entry, target, sizeof target - 1);
    if (n < 0)
        child_fail_errno(errno, "cannot read", text_bytes(name));
    target[n] = 0;
    add_attributes(dir, entry, name);
    put_entry(name, st, '2', target, 0);
}

/* --- the tree ------------------------------------------------------------------------------- */

static void put_tree(int dir, char *name, size_t name_n, int depth);

static void put_directory(int dir, const char *entry, char *name, size_t name_n, int depth)
{
    struct stat st;
    int fd = openat(dir, entry, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) < 0 || depth == DEPTH)
        child_fail_errno(fd < 0 ? errno : ENAMETOOLONG, "cannot enter", text_bytes(name));
    add_attributes(dir, entry, name);
    name[name_n] = '/';
    name[name_n + 1] = 0;
    put_entry(name, &st, '5', NULL, 0);
    put_tree(fd, name, name_n + 1, depth + 1);
}

static void put_any(int dir, const char *entry, char *name, size_t name_n, int depth)
{
    struct stat st;
    if (fstatat(dir, entry, &st, AT_SYMLINK_NOFOLLOW) < 0)
        child_fail_errno(errno, "cannot look at", text_bytes(name));
    bool linked = !S_ISDIR(st.st_mode) && !S_ISSOCK(st.st_mode) && st.st_nlink > 1;
    const char *earlier = linked ? tar_earlier_name(&st, name) : NULL;
    if (earlier) { /* whiteouts, too: the kernel makes one and links it */
        put_entry(name, &st, '1', earlier, 0);
        return;
    }
    switch (st.st_mode & S_IFMT) {
    case S_IFDIR:
        put_directory(dir, entry, name, name_n, depth);
        break;
    case S_IFREG:
        put_file(dir, entry, name, &st);
        break;
    case S_IFLNK:
        put_link(dir, entry, name, &st);
        break;
    case S_IFSOCK:
        sockets++; /* tar knows none, and nobody listens on it later */
        break;
    default:
        add_attributes(dir, entry, name);
        put_entry(name, &st, S_ISCHR(st.st_mode) ? '3' : S_ISBLK(st.st_mode) ? '4' : '6', NULL, 0);
    }
}

/* Takes `dir`. */
static void put_tree(int dir, char *name, size_t name_n, int depth)
{
    DIR *entries = fdopendir(dir);
    if (!entries)
        child_fail_errno(errno, "cannot enter", text_bytes(name));
    for (struct dirent *d; (d = readdir(entries));) {
        size_t n = strlen(d->d_name);
        if (strcmp(d->d_name, ".") == 0 || strcmp(d->d_name, "..") == 0)
            continue;
        if (name_n + n + 2 > TREE_PATH)
            child_fail_errno(ENAMETOOLONG, "cannot enter", text_bytes(d->d_name));
        memcpy(name + name_n, d->d_name, n + 1);
        put_any(dirfd(entries), d->d_name, name, name_n + n, depth);
    }
    closedir(entries);
}

static _Noreturn void pack_result(uint64_t size)
{
    uint8_t room[64];
    struct mp_writer w = mp_writer_of(room, sizeof room);
    mp_put_map(&w, 2);
    mp_put_text(&w, "size");
    mp_put_u64(&w, size);
    mp_put_text(&w, "sockets");
    mp_put_u64(&w, sockets);
    child_result(room, mp_written(&w));
}

_Noreturn void vm_pack_child(const struct child_fds *fds)
{
    static char name[TREE_PATH + 2] = ".";
    child_stay(fds, FD_CGROUP, FD_UPPER);
    segments = map_alloc(SEGMENTS * sizeof *segments);
    pax = map_alloc(PAX_BYTES);
    names = map_alloc(ATTRIBUTES);
    value = map_alloc(ATTRIBUTES);
    if (!tar_begin() || !segments || !pax || !names || !value)
        child_fail_errno(ENOMEM, "cannot pack the machine", nothing());
    wait_for_freeze();
    put_directory(UPPER_DIR, UPPER, name, 1, 0);
    pack_result(tar_end());
}
