/* A tar stream being written to OUT_FD: blocks, headers, records of pax headers, names of hard links. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "files.h"
#include "loop.h"
#include "tar.h"

#define LINKS 65536
#define LINK_BYTES (16u << 20)
#define BUFFER_BYTES (256u << 10)

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

void tar_put(const void *data, size_t n)
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

void tar_pad(uint64_t size)
{
    tar_put(NULL, (size_t)(-size & (TAR_BLOCK - 1)));
}

void tar_octal(char *field, int width, uint64_t value)
{
    for (int i = width - 2; i >= 0; i--, value >>= 3)
        field[i] = (char)('0' + (value & 7));
}

void tar_put_header(struct tar_header *h)
{
    char text[8];
    memcpy(h->magic, "ustar", 6);
    memcpy(h->version, "00", 2);
    snprintf(text, sizeof text, "%06o", tar_checksum(h));
    memcpy(h->checksum, text, 7);
    h->checksum[7] = ' ';
    tar_put(h, sizeof *h);
}

/* One pax record: its own length in decimal, counted into itself. */
size_t tar_record(char *out, const char *key, const char *value, size_t n)
{
    size_t body = strlen(key) + n + 3, digits = 1;
    for (size_t limit = 10; body + digits >= limit; limit *= 10)
        digits++;
    int head = sprintf(out, "%zu %s=", body + digits, key);
    memcpy(out + head, value, n);
    out[(size_t)head + n] = '\n';
    return (size_t)head + n + 1;
}

size_t tar_record_number(char *out, const char *key, uint64_t value)
{
    char text[24];
    int n = snprintf(text, sizeof text, "%llu", (unsigned long long)value);
    return tar_record(out, key, text, (size_t)n);
}

/* The first name under which a file with several was sent; NULL: this is the first. */
const char *tar_earlier_name(const struct stat *st, const char *name)
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

bool tar_put_content(int fd, uint64_t left)
{
    while (left) {
        size_t room = BUFFER_BYTES - buffered;
        ssize_t n = read(fd, buffer + buffered, room < left ? room : (size_t)left);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return false;
        if (n == 0) { /* it shrank: the header's size is a promise */
            for (; left; left -= left < 65536 ? left : 65536)
                tar_put(NULL, left < 65536 ? (size_t)left : 65536);
            break;
        }
        buffered += (size_t)n;
        left -= (uint64_t)n;
        if (buffered == BUFFER_BYTES)
            flush();
    }
    return true;
}

bool tar_begin(void)
{
    buffer = map_alloc(BUFFER_BYTES);
    links = map_alloc(LINKS * sizeof *links);
    link_names = map_alloc(LINK_BYTES);
    return buffer && links && link_names;
}

uint64_t tar_end(void)
{
    tar_put(NULL, 2 * TAR_BLOCK);
    flush();
    return sent;
}

void tar_put_pax(const char *records, size_t n)
{
    struct tar_header x = { .type = 'x' };
    strcpy(x.name, "././@PaxHeader");
    tar_octal(x.mode, 8, 0644);
    tar_octal(x.uid, 8, 0);
    tar_octal(x.gid, 8, 0);
    tar_octal(x.size, 12, n);
    tar_octal(x.mtime, 12, 0);
    tar_put_header(&x);
    tar_put(records, n);
    tar_pad(n);
}
