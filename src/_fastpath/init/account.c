/* Users and groups as the sandbox's own /etc/passwd and /etc/group define them. No NSS: a static
 * program must not load the sandbox's libraries, and the files may be hostile. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "child.h"
#include "loop.h"

#define ACCOUNT_FILE_MAX (1u << 20)
#define ACCOUNT_FILE_SMALL 4096

struct text {
    const char *p, *end;
};

static struct text read_file(const char *path)
{
    struct stat st;
    struct {
        uint64_t flags, mode, resolve;
    } how = {
        /* O_NONBLOCK: the sandbox may have put a FIFO there. */
        .flags = O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY,
        .resolve = 0x02 /* RESOLVE_NO_MAGICLINKS: nor a link to a descriptor of ours */,
    };
    int fd = (int)syscall(SYS_openat2, AT_FDCWD, path, &how, sizeof how);
    if (fd < 0)
        return (struct text){ 0 };
    static char small[ACCOUNT_FILE_SMALL]; /* whoever reads again has finished with it */
    char *p = NULL;
    size_t n = 0;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size > 0 &&
        st.st_size <= ACCOUNT_FILE_MAX)
        p = st.st_size <= ACCOUNT_FILE_SMALL ? small : map_alloc((size_t)st.st_size);
    while (p && n < (size_t)st.st_size) {
        ssize_t got = read(fd, p + n, (size_t)st.st_size - n);
        if (got <= 0)
            break;
        n += (size_t)got;
    }
    close(fd);
    return (struct text){ p, p + n };
}

/* Split the next line at colons; missing fields are empty. False at the end of the text. */
static bool next_entry(struct text *text, struct mp_bytes *fields, int n_fields)
{
    const char *p = text->p, *start = p;
    int i = 0;
    if (p >= text->end)
        return false;
    for (; p < text->end && *p != '\n'; p++)
        if (*p == ':' && i < n_fields) {
            fields[i++] = (struct mp_bytes){ (const uint8_t *)start, (size_t)(p - start) };
            start = p + 1;
        }
    for (; i < n_fields; i++, start = p)
        fields[i] = (struct mp_bytes){ (const uint8_t *)start, (size_t)(p - start) };
    text->p = p + 1;
    return true;
}

bool parse_number(const char *p, size_t n, uint32_t *out)
{
    uint64_t value = 0;
    if (n == 0 || n > 10)
        return false;
    for (size_t i = 0; i < n; i++) {
        if (p[i] < '0' || p[i] > '9')
            return false;
        value = value * 10 + (uint64_t)(p[i] - '0');
    }
    if (value >= UINT32_MAX) /* (uid_t)-1 means "leave it" to the kernel */
        return false;
    *out = (uint32_t)value;
    return true;
}

static bool field_number(struct mp_bytes field, uint32_t *out)
{
    return parse_number((const char *)field.p, field.n, out);
}

static void copy(char *to, size_t room, struct mp_bytes from)
{
    if (from.n >= room)
        from.n = room - 1;
    memcpy(to, from.p, from.n);
    to[from.n] = 0;
}

static bool same(struct mp_bytes a, struct mp_bytes b)
{
    return a.n == b.n && memcmp(a.p, b.p, a.n) == 0;
}

bool account_group(struct mp_bytes group, gid_t *gid)
{
    if (field_number(group, gid))
        return true;
    struct text text = read_file("/etc/group");
    struct mp_bytes fields[4];
    while (next_entry(&text, fields, 4))
        if (same(fields[0], group) && field_number(fields[2], gid))
            return true;
    return false;
}

static bool member(struct mp_bytes list, const char *name)
{
    size_t n = strlen(name);
    const char *p = (const char *)list.p, *end = p + list.n;
    while (p < end) {
        const char *comma = memchr(p, ',', (size_t)(end - p));
        const char *stop = comma ? comma : end;
        if ((size_t)(stop - p) == n && memcmp(p, name, n) == 0)
            return true;
        p = stop + 1;
    }
    return false;
}

static void find_groups(struct identity *who)
{
    struct text text = read_file("/etc/group");
    struct mp_bytes fields[4];
    int room = (int)(sizeof who->groups / sizeof who->groups[0]);
    gid_t gid;
    who->groups[who->n_groups++] = who->gid;
    while (who->n_groups < room && next_entry(&text, fields, 4))
        if (member(fields[3], who->name) && field_number(fields[2], &gid) && gid != who->gid)
            who->groups[who->n_groups++] = gid;
}

/* The passwd entry of a name or a number; false when there is none. */
static bool find_entry(struct mp_bytes user, bool numeric, struct identity *who)
{
    struct text text = read_file("/etc/passwd");
    struct mp_bytes fields[7];
    uint32_t uid, gid;
    while (next_entry(&text, fields, 7)) {
        if (!field_number(fields[2], &uid) || !field_number(fields[3], &gid))
            continue;
        if (numeric ? uid != who->uid : !same(fields[0], user))
            continue;
        who->uid = uid;
        who->gid = gid;
        copy(who->name, sizeof who->name, fields[0]);
        copy(who->home, sizeof who->home, fields[5]);
        copy(who->shell, sizeof who->shell, fields[6]);
        return true;
    }
    return false;
}

bool account_find(struct mp_bytes user, struct identity *who)
{
    memset(who, 0, sizeof *who);
    const char *p = (const char *)user.p;
    const char *colon = user.n ? memchr(p, ':', user.n) : NULL;
    struct mp_bytes name = { user.p, colon ? (size_t)(colon - p) : user.n };
    bool numeric = field_number(name, &who->uid);
    bool found = find_entry(name, numeric, who);
    if (!found && !numeric && mp_equal(name, "root"))
        found = true; /* uid 0 exists in a root without /etc/passwd as well */
    if (!found && !numeric)
        return false;
    if (!found) {
        who->gid = who->uid;
        snprintf(who->name, sizeof who->name, "%u", who->uid);
    }
    if (!who->name[0])
        copy(who->name, sizeof who->name, name);
    if (!who->home[0])
        strcpy(who->home, who->uid == 0 ? "/root" : "/");
    if (!who->shell[0])
        strcpy(who->shell, "/bin/sh");
    if (colon) {
        struct mp_bytes group = { user.p + name.n + 1, user.n - name.n - 1 };
        if (!account_group(group, &who->gid))
            return false;
        who->groups[who->n_groups++] = who->gid;
        return true;
    }
    find_groups(who);
    return true;
}
