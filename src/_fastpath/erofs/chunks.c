#include "erofs/chunks.h"

#include <errno.h>
#include <openssl/evp.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Below this asking for holes costs more than reading them. */
#define HOLES_FROM (4 * CHUNK_BYTES)

static int is_zero(const uint8_t *p, size_t length)
{
    return p[0] == 0 && memcmp(p, p + 1, length - 1) == 0;
}

static int read_all(int fd, uint8_t *buffer, size_t length, off_t at)
{
    while (length) {
        ssize_t got = pread(fd, buffer, length, at);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return got < 0 ? -errno : -ENODATA;
        buffer += got;
        length -= (size_t)got;
        at += got;
    }
    return 0;
}

/* Where the next data is, rounded down to a chunk, at most the end; `*until` becomes where that data
 * ends. A file system that cannot tell has data everywhere. */
static int next_data(const struct chunk_reader *reader, off_t *data, off_t *until)
{
    struct stat now;

    *data = reader->at;
    *until = reader->end;
    off_t found = lseek(reader->fd, reader->at, SEEK_DATA);
    if (found < 0 && errno != ENXIO)
        return errno == EINVAL || errno == ENOTSUP || errno == ESPIPE ? 0 : -errno;
    if (found < 0 || found >= reader->end) {
        *data = reader->end;
    } else {
        *data = found - found % CHUNK_BYTES;
        off_t hole = lseek(reader->fd, found, SEEK_HOLE);
        if (hole > found && hole < reader->end)
            *until = hole;
    }
    /* A file that was cut off meanwhile looks like one that ends in a hole. */
    if (*data > reader->at && fstat(reader->fd, &now) < 0)
        return -errno;
    return *data > reader->at && now.st_size < reader->end ? -ENODATA : 0;
}

static int hash(const uint8_t *p, size_t length, uint8_t *digest)
{
    return EVP_Digest(p, length, digest, NULL, EVP_sha256(), NULL) == 1 ? 0 : -EIO;
}

/* Take the chunk that was read to the end of the buffer. */
static int add(struct chunk_reader *reader, size_t length, const char **step)
{
    uint8_t *chunk = reader->buffer + reader->used;
    struct chunk_found *found = &reader->chunks[reader->count];
    if (is_zero(chunk, length)) {
        reader->holes++;
        return 0;
    }
    *step = "hash";
    int error = hash(chunk, length, found->digest);
    if (error)
        return error;
    size_t padding = -length % CHUNK_BLOCK;
    memset(chunk + length, 0, padding);
    reader->used += length + padding;
    found->holes = reader->holes;
    reader->holes = 0;
    reader->count++;
    return 0;
}

int read_chunks(struct chunk_reader *reader, const char **step)
{
    off_t until = reader->end < HOLES_FROM ? reader->end : 0;
    int error = 0;

    reader->count = 0;
    reader->holes = 0;
    while (!error && reader->at < reader->end && reader->count < CHUNKS_MAX) {
        off_t left = reader->end - reader->at;
        size_t length = left < CHUNK_BYTES ? (size_t)left : CHUNK_BYTES;
        if (length + -length % CHUNK_BLOCK > reader->capacity - reader->used)
            break;
        if (reader->at >= until) {
            off_t data;
            *step = "seek";
            error = next_data(reader, &data, &until);
            if (error)
                break;
            if (data > reader->at) {
                reader->holes += (uint64_t)(data - reader->at + CHUNK_BYTES - 1) / CHUNK_BYTES;
                reader->at = data;
                continue;
            }
        }
        *step = "read";
        error = read_all(reader->fd, reader->buffer + reader->used, length, reader->at);
        if (!error) {
            reader->at += (off_t)length;
            error = add(reader, length, step);
        }
    }
    return error;
}
