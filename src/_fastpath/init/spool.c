#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "config.h"
#include "job.h"

static uint64_t stored; /* bytes kept by all commands */

static struct drain {
    struct source in;
    uint64_t adopted; /* 0: unused, else the place in the order of adoption */
} *drains;

bool drain_table_open(void)
{
    drains = table_alloc(MAX_DRAINS * sizeof *drains);
    return drains != NULL;
}

uint64_t spool_bytes(void)
{
    return stored;
}

void stream_open(struct stream *stream, struct job *job)
{
    *stream = (struct stream){ .in.fd = -1, .job = job, .file = -1 };
}

/* A file without a name, and O_EXCL: without the way to get one. */
static int spool_file(void)
{
    if (!config.has_spool)
        return memfd_create("output", MFD_CLOEXEC);
    return openat(FD_SPOOL, ".", O_TMPFILE | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
}

/* Give up the oldest finished output that nobody reads; false when there is none. */
static bool evict_one(const struct job *sparing)
{
    struct job *oldest = NULL;
    for (struct job *job = jobs_next(NULL); job; job = jobs_next(job))
        if (job->state == JOB_ENDED && job != sparing && !job->calls &&
            job->out[0].kept + job->out[1].kept > 0 && (!oldest || job->ended_us < oldest->ended_us))
            oldest = job;
    if (!oldest)
        return false;
    stream_discard(&oldest->out[0]);
    stream_discard(&oldest->out[1]);
    return true;
}

static size_t admitted(const struct stream *stream, size_t n)
{
    const struct job *job = stream->job;
    uint64_t kept = job->out[0].kept + job->out[1].kept;
    uint64_t room = kept < job->limit ? job->limit - kept : 0;
    if (n > room)
        n = (size_t)room;
    while (stored + n > config.spool_limit && evict_one(job))
        ;
    if (stored + n > config.spool_limit)
        n = stored < config.spool_limit ? (size_t)(config.spool_limit - stored) : 0;
    return n;
}

static size_t write_file(struct stream *stream, const uint8_t *data, size_t n, uint64_t at)
{
    size_t done = 0;
    while (done < n) {
        ssize_t wrote = pwrite(stream->file, data + done, n - done, (off_t)(at + done));
        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote <= 0)
            break; /* the spool's disk is full: count on, keep no more */
        done += (size_t)wrote;
    }
    return done;
}

/* From memory to a file of its own, once the output is not small any more. */
static bool to_file(struct stream *stream)
{
    stream->file = spool_file();
    if (stream->file < 0)
        return false;
    size_t n = (size_t)stream->kept;
    if (write_file(stream, stream->memory, n, 0) != n) {
        close(stream->file);
        stream->file = -1;
        return false;
    }
    map_free(stream->memory, STREAM_MEMORY);
    stream->memory = NULL;
    return true;
}

void stream_store(struct stream *stream, const uint8_t *data, size_t n)
{
    stream->total += n;
    if (stream->full || !n)
        return;
    size_t take = admitted(stream, n);
    stream->full = take < n;
    if (stream->file < 0 && stream->kept + take <= STREAM_MEMORY) {
        if (!stream->memory && take)
            stream->memory = map_alloc(STREAM_MEMORY);
        if (!stream->memory) {
            stream->full = true;
            return;
        }
        memcpy(stream->memory + stream->kept, data, take);
    } else {
        if (stream->file < 0 && !to_file(stream)) {
            stream->full = true;
            return;
        }
        size_t wrote = write_file(stream, data, take, stream->kept);
        stream->full |= wrote < take;
        take = wrote;
    }
    stream->kept += take;
    stored += take;
}

size_t stream_read(const struct stream *stream, uint64_t offset, uint8_t *to, size_t n)
{
    if (offset >= stream->kept)
        return 0;
    if (n > stream->kept - offset)
        n = (size_t)(stream->kept - offset);
    if (stream->file < 0) {
        memcpy(to, stream->memory + offset, n);
        return n;
    }
    ssize_t got = pread(stream->file, to, n, (off_t)offset);
    return got > 0 ? (size_t)got : 0;
}

void stream_discard(struct stream *stream)
{
    stored -= stream->kept;
    stream->kept = 0;
    stream->full = stream->full || stream->total > 0;
    map_free(stream->memory, STREAM_MEMORY);
    stream->memory = NULL;
    if (stream->file >= 0)
        close(stream->file);
    stream->file = -1;
}

/* Up to one chunk; how much, 0 when there is none now. The source is closed at its end. */
static size_t take_chunk(struct stream *stream)
{
    ssize_t n;
    do
        n = read(stream->in.fd, scratch, READ_CHUNK);
    while (n < 0 && errno == EINTR);
    if (n < 0 && errno == EAGAIN)
        return 0;
    if (n <= 0) { /* EOF; EIO: the last holder of the terminal closed it */
        source_close(&stream->in);
        return 0;
    }
    scratch_used((size_t)n);
    stream_store(stream, scratch, (size_t)n);
    return (size_t)n;
}

static void stream_ready(struct source *source, uint32_t events)
{
    struct stream *stream = owner_of(source, struct stream, in);
    (void)events;
    take_chunk(stream);
    job_pump(stream->job);
}

bool stream_listen(struct stream *stream, int fd)
{
    return source_open(&stream->in, fd, EPOLLIN, stream_ready);
}

void stream_drain(struct stream *stream)
{
    int waiting = 0;
    /* A terminal's buffer is flushed by the read itself, so its fill level says nothing: take what
     * comes, up to more than a terminal can hold. */
    if (stream->in.fd < 0)
        return;
    if (stream->job->pty || ioctl(stream->in.fd, FIONREAD, &waiting) < 0)
        waiting = 1 << 20;
    for (size_t left = (size_t)waiting; stream->in.fd >= 0;) {
        size_t n = take_chunk(stream);
        if (n == 0 || n >= left)
            break;
        left -= n;
    }
}

void stream_free(struct stream *stream)
{
    stream_discard(stream);
    if (stream->in.fd >= 0)
        drain_adopt(source_release(&stream->in));
}

static void drain_ready(struct source *source, uint32_t events)
{
    struct drain *drain = owner_of(source, struct drain, in);
    (void)events;
    ssize_t n = read(source->fd, scratch, READ_CHUNK);
    if (n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR)))
        return;
    source_close(source);
    drain->adopted = 0;
}

/* Closed, the holders of the other end would die by SIGPIPE, so we read on; but each costs a
 * descriptor of ours, and a sandbox can make any number: the oldest is given up. */
void drain_adopt(int fd)
{
    static uint64_t order;
    struct drain *drain = drains;
    for (struct drain *d = drains; d < drains + MAX_DRAINS && drain->adopted; d++)
        if (d->adopted < drain->adopted)
            drain = d;
    if (drain->adopted)
        source_close(&drain->in);
    drain->adopted = ++order;
    if (!source_open(&drain->in, fd, EPOLLIN, drain_ready)) {
        close(fd);
        drain->adopted = 0;
    }
}
