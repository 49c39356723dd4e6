#include "blobd/fuse.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "blobd/fetch.h"
#include "blobd/log.h"
#include "blobd/preaccess.h"

#define NOTIFY_RESEND 7 /* FUSE_NOTIFY_RESEND, Linux 6.9 */
#define READ_MAX (1u << 20)
#define REQUEST_MAX FUSE_MIN_READ_BUFFER /* no writes: every request is small */
#define BACKGROUND 4096 /* reads the kernel may have under way: stalled ones must not stop others */
#define PIPE_BYTES (512u << 10)
#define SPLICE_MIN (32u << 10)
#define ATTR_VALID_S 3600 /* a blob never changes */

struct request {
    const struct fuse_in_header *header;
    const void *body;
    size_t size; /* of the body */
};

/* Each thread's own; they live as long as the process. */
struct lane {
    int pipe[2]; /* 0: none yet */
    uint8_t *data;
};

static int device = -1;
static __thread struct lane lane;

/* --- answers ------------------------------------------------------------------------------- */

/* ENOENT: the kernel has given the request up; ENODEV: unmounted. Neither is an error here. */
static void send_parts(struct iovec *parts, int count)
{
    if (writev(device, parts, count) < 0 && errno != ENOENT && errno != ENODEV)
        log_line(LOG_ERROR, "cannot answer the kernel", NULL, "%s", strerror(errno));
}

static void reply(uint64_t unique, const void *body, size_t size)
{
    struct fuse_out_header header = { .len = (uint32_t)(sizeof header + size), .unique = unique };
    struct iovec parts[2] = { { &header, sizeof header }, { (void *)(uintptr_t)body, size } };
    send_parts(parts, size ? 2 : 1);
}

void fuse_reply_error(uint64_t unique, int error)
{
    struct fuse_out_header header = { .len = sizeof header, .error = -error, .unique = unique };
    struct iovec part = { &header, sizeof header };

    if (unique & PREACCESS_UNIQUE)
        preaccess_answer(unique, false);
    else
        send_parts(&part, 1);
}

static bool open_pipe(void)
{
    if (lane.pipe[1])
        return true;
    if (pipe2(lane.pipe, O_CLOEXEC) < 0)
        return false;
    if (fcntl(lane.pipe[1], F_SETPIPE_SZ, PIPE_BYTES) >= (int)PIPE_BYTES)
        return true;
    close(lane.pipe[0]);
    close(lane.pipe[1]);
    lane.pipe[1] = 0;
    return false;
}

/* The file's pages go to the kernel without a copy through this process. False: nothing was sent. */
static bool splice_file(uint64_t unique, int file, uint64_t offset, uint32_t size)
{
    struct fuse_out_header header = { .len = (uint32_t)sizeof header + size, .unique = unique };
    loff_t at = (loff_t)offset;
    uint32_t left = size;

    if (size < SPLICE_MIN || size > PIPE_BYTES - 2 * BLOCK || !open_pipe())
        return false;
    bool filled = write(lane.pipe[1], &header, sizeof header) == sizeof header;
    while (filled && left) {
        ssize_t n = splice(file, &at, lane.pipe[1], NULL, left, SPLICE_F_NONBLOCK);
        filled = n > 0;
        left -= n > 0 ? (uint32_t)n : 0;
    }
    if (filled && splice(lane.pipe[0], NULL, device, NULL, header.len, 0) == (ssize_t)header.len)
        return true;
    int error = errno;
    close(lane.pipe[0]); /* with what is in it */
    close(lane.pipe[1]);
    lane.pipe[1] = 0;
    return filled && (error == ENOENT || error == ENODEV);
}

void fuse_reply_file(uint64_t unique, int file, uint64_t offset, uint32_t size)
{
    if (unique & PREACCESS_UNIQUE) {
        preaccess_answer(unique, true);
        return;
    }
    if (splice_file(unique, file, offset, size))
        return;
    if (!lane.data)
        lane.data = malloc(READ_MAX);
    for (uint32_t done = 0; lane.data && done < size;) {
        ssize_t n = pread(file, lane.data + done, size - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            log_line(LOG_ERROR, "cannot read the cache", NULL, "%s", n ? strerror(errno) : "short");
            fuse_reply_error(unique, EIO);
            return;
        }
        done += (uint32_t)n;
    }
    if (lane.data)
        reply(unique, lane.data, size);
    else
        fuse_reply_error(unique, ENOMEM);
}

/* --- requests ------------------------------------------------------------------------------ */

static void fill_attr(struct fuse_attr *attr, const struct blob *blob)
{
    *attr = (struct fuse_attr){ .ino = blob ? blob->nodeid : FUSE_ROOT_ID,
                                .size = blob ? blob->length : 0,
                                .blocks = blob ? blob->length / 512 : 0,
                                .mode = blob ? S_IFREG | 0400 : S_IFDIR | 0500,
                                .nlink = blob ? 1 : 2,
                                .blksize = BLOCK };
}

static void do_init(const struct request *request)
{
    const struct fuse_init_in *in = request->body;
    const uint32_t wanted = FUSE_ASYNC_READ | FUSE_ASYNC_DIO | FUSE_BIG_WRITES | FUSE_MAX_PAGES |
                            FUSE_PARALLEL_DIROPS;
    struct fuse_init_out out = { .major = FUSE_KERNEL_VERSION,
                                 .minor = FUSE_KERNEL_MINOR_VERSION,
                                 .max_readahead = in->max_readahead,
                                 .flags = in->flags & wanted,
                                 .max_background = BACKGROUND,
                                 .congestion_threshold = BACKGROUND,
                                 .max_write = BLOCK,
                                 .time_gran = 1,
                                 .max_pages = READ_MAX / BLOCK };
    reply(request->header->unique, &out, sizeof out);
}

static void do_lookup(const struct request *request)
{
    const char *name = request->body;
    struct blob *blob = NULL;

    if (request->header->nodeid == FUSE_ROOT_ID && blob_id_valid(name, strnlen(name, request->size)))
        blob = cache_find(name);
    if (!blob) {
        fuse_reply_error(request->header->unique, ENOENT);
        return;
    }
    struct fuse_entry_out out = { .nodeid = blob->nodeid, .attr_valid = ATTR_VALID_S };
    fill_attr(&out.attr, blob);
    cache_unref(blob);
    reply(request->header->unique, &out, sizeof out);
}

static void do_getattr(const struct request *request)
{
    struct fuse_attr_out out = { .attr_valid = ATTR_VALID_S };
    struct blob *blob = NULL;

    if (request->header->nodeid != FUSE_ROOT_ID) {
        blob = cache_find_node(request->header->nodeid);
        if (!blob) {
            fuse_reply_error(request->header->unique, ESTALE);
            return;
        }
    }
    fill_attr(&out.attr, blob);
    if (blob)
        cache_unref(blob);
    reply(request->header->unique, &out, sizeof out);
}

static void do_open(const struct request *request)
{
    const struct fuse_open_in *in = request->body;
    struct fuse_open_out out = { .open_flags = FOPEN_DIRECT_IO | FOPEN_NOFLUSH };

    if ((in->flags & O_ACCMODE) != O_RDONLY)
        fuse_reply_error(request->header->unique, EROFS);
    else
        reply(request->header->unique, &out, sizeof out);
}

static void do_read(const struct request *request)
{
    const struct fuse_read_in *in = request->body;
    uint64_t unique = request->header->unique;
    struct blob *blob = cache_find_node(request->header->nodeid);

    if (!blob || in->size > READ_MAX) {
        fuse_reply_error(unique, blob ? EINVAL : ESTALE);
    } else if (in->offset >= blob->length || in->size == 0) {
        reply(unique, NULL, 0);
    } else {
        uint64_t left = blob->length - in->offset;
        serve_read(blob, unique, in->offset, left < in->size ? (uint32_t)left : in->size,
                   request->header->pid);
        return; /* with the reference */
    }
    if (blob)
        cache_unref(blob);
}

static void do_interrupt(const struct request *request)
{
    const struct fuse_interrupt_in *in = request->body;

    /* It may have overtaken its read: EAGAIN makes the kernel send it again while that is open. */
    if (!interrupt_job(in->unique))
        fuse_reply_error(request->header->unique, EAGAIN);
}

static void do_statfs(const struct request *request)
{
    struct fuse_statfs_out out = { .st = { .bsize = BLOCK, .frsize = BLOCK, .namelen = ID_SIZE - 1 } };
    reply(request->header->unique, &out, sizeof out);
}

static void do_opendir(const struct request *request)
{
    struct fuse_open_out out = { 0 };
    reply(request->header->unique, &out, sizeof out);
}

static void do_nothing(const struct request *request) /* also the end of a listing: it is empty */
{
    reply(request->header->unique, NULL, 0);
}

static void no_answer(const struct request *request)
{
    (void)request;
}

static const struct handler {
    uint32_t opcode;
    size_t body; /* least size */
    void (*run)(const struct request *request);
} handlers[] = {
    { FUSE_READ, sizeof(struct fuse_read_in), do_read },
    { FUSE_LOOKUP, 1, do_lookup },
    { FUSE_GETATTR, 0, do_getattr },
    { FUSE_OPEN, sizeof(struct fuse_open_in), do_open },
    { FUSE_RELEASE, 0, do_nothing },
    { FUSE_FORGET, 0, no_answer },
    { FUSE_BATCH_FORGET, 0, no_answer },
    { FUSE_INTERRUPT, sizeof(struct fuse_interrupt_in), do_interrupt },
    { FUSE_OPENDIR, 0, do_opendir },
    { FUSE_READDIR, 0, do_nothing },
    { FUSE_RELEASEDIR, 0, do_nothing },
    { FUSE_STATFS, 0, do_statfs },
    { FUSE_INIT, 16, do_init },
    { FUSE_DESTROY, 0, do_nothing },
};

static void dispatch(const struct request *request)
{
    for (size_t i = 0; i < sizeof handlers / sizeof *handlers; i++) {
        if (handlers[i].opcode != request->header->opcode)
            continue;
        if (request->size >= handlers[i].body)
            handlers[i].run(request);
        else
            fuse_reply_error(request->header->unique, EINVAL);
        return;
    }
    fuse_reply_error(request->header->unique, ENOSYS);
}

static void *serve(void *unused)
{
    _Alignas(struct fuse_in_header) char buffer[REQUEST_MAX];

    for (;;) {
        ssize_t n = read(device, buffer, sizeof buffer);
        if (n < 0 && (errno == EINTR || errno == EAGAIN || errno == ENOENT))
            continue;
        if (n < 0) {
            log_line(LOG_INFO, "the directory of blobs was unmounted", NULL, "%s", strerror(errno));
            _exit(0);
        }
        if ((size_t)n < sizeof(struct fuse_in_header))
            continue;
        struct request request = { .header = (struct fuse_in_header *)buffer,
                                   .body = buffer + sizeof(struct fuse_in_header),
                                   .size = (size_t)n - sizeof(struct fuse_in_header) };
        dispatch(&request);
    }
    return unused;
}

bool fuse_start(int fd, uint32_t threads)
{
    device = fd;
    for (uint32_t i = 0; i < threads; i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, serve, NULL) != 0)
            return i > 0;
        pthread_detach(thread);
    }
    return true;
}

int fuse_resend(int fd)
{
    struct fuse_out_header notice = { .len = sizeof notice, .error = NOTIFY_RESEND };
    return write(fd, &notice, sizeof notice) == sizeof notice ? 0 : -errno;
}
