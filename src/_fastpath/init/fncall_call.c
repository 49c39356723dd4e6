/* One call in a room: what it is given, what it wrote, how it ended (fncall.h). */
#include "fncall.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "files.h"

#define MAX_PATHS (1u << 20)
#define MAX_BODY (16u << 20)

struct ready {
    uint8_t kind, unused[3];
    uint32_t took_us; /* since the answer before */
};

struct done {
    uint8_t kind, timed_out, truncated, dirty;
    int32_t status;
    uint32_t started_us, run_us, emptied_us; /* each since the one before */
    uint32_t outputs[OUTPUTS];
    uint32_t files; /* bytes: for each its index in `paths`, its size, its content */
};

struct output {
    uint8_t *kept; /* MAX_OUTPUT bytes */
    size_t n;
    int fd; /* -1: at its end */
};

struct running {
    struct ask ask;
    uint8_t *text; /* the paths, then the body */
    size_t sent;   /* of the body */
    struct output outputs[OUTPUTS];
    uint8_t *files; /* `room` bytes, or NULL */
    size_t room;
    struct done done;
};

static size_t text_size(const struct running *run)
{
    return (size_t)run->ask.paths + run->ask.body;
}

/* The daemon has closed the channel: nobody needs the worker any more. */
static void channel_read(void *to, size_t n)
{
    if (n && read_all(CTL_FD, to, n) != 1)
        _exit(0);
}

static void channel_write(struct iovec *parts, size_t n_parts)
{
    struct msghdr message = { .msg_iov = parts, .msg_iovlen = n_parts };
    while (message.msg_iovlen) {
        ssize_t n = sendmsg(CTL_FD, &message, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            _exit(0);
        while (message.msg_iovlen && (size_t)n >= message.msg_iov->iov_len) {
            n -= (ssize_t)message.msg_iov->iov_len;
            message.msg_iov++;
            message.msg_iovlen--;
        }
        if (message.msg_iovlen) {
            message.msg_iov->iov_base = (uint8_t *)message.msg_iov->iov_base + n;
            message.msg_iov->iov_len -= (size_t)n;
        }
    }
}

static _Noreturn void not_understood(void)
{
    child_fail(INVALID_ARGUMENT, "the daemon's request is not understood");
}

/* Until the daemon asks. If who waits for the call ends before that, no call is lost with it. */
static void await_request(const struct keeper *keeper, struct room *room)
{
    struct pollfd ready[2] = { { CTL_FD, POLLIN, 0 }, { keeper->signals, POLLIN, 0 } };
    do {
        poll(ready, 2, -1);
        if (ready[1].revents)
            room_reap(keeper, room);
        if (!room->init || !room->call)
            child_fail(INTERNAL, "the process that waited for a call was killed");
    } while (!ready[0].revents);
}

static void receive(const struct keeper *keeper, struct room *room, struct running *run)
{
    do {
        await_request(keeper, room);
        channel_read(&run->ask, sizeof run->ask);
    } while (run->ask.kind == ASK_KILL); /* for the call before, which had ended */
    const struct ask *ask = &run->ask;
    if (ask->kind != ASK_CALL || ask->paths > MAX_PATHS || ask->body > MAX_BODY ||
        ask->output_limit > MAX_OUTPUT)
        not_understood();
    run->text = text_size(run) ? map_alloc(text_size(run)) : NULL;
    if (text_size(run) && !run->text)
        child_fail(EXHAUSTED, "no memory for the request");
    channel_read(run->text, text_size(run));
    run->sent = 0;
    run->files = NULL;
    run->done = (struct done){ .kind = ANSWER_DONE };
}

/* --- while it runs --------------------------------------------------------------------------------- */

static void feed(struct running *run, int line)
{
    const uint8_t *body = run->text + run->ask.paths;
    ssize_t n = send(line, body + run->sent, run->ask.body - run->sent, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n > 0)
        run->sent += (size_t)n;
    else if (n < 0 && errno != EAGAIN && errno != EINTR)
        run->sent = run->ask.body; /* it does not want it */
}

/* All is read, and the first `output_limit` bytes are kept. False: nothing is there now. */
static bool take(struct running *run, struct output *output)
{
    static uint8_t rest[64 << 10];
    size_t room = run->ask.output_limit - output->n;
    ssize_t n = read(output->fd, room ? output->kept + output->n : rest, room ? room : sizeof rest);
    if (n > 0 && room)
        output->n += (size_t)n;
    else if (n > 0)
        run->done.truncated = true;
    else if (n == 0 || (errno != EAGAIN && errno != EINTR))
        output->fd = -1;
    return n > 0;
}

static void take_order(void)
{
    struct ask order;
    channel_read(&order, sizeof order);
    if (order.kind != ASK_KILL)
        not_understood();
}

/* Until the call itself has ended, whoever else lives in the room, or it shall: its time is over, or the daemon
 * says so. */
static void follow(const struct keeper *keeper, struct room *room, struct running *run)
{
    uint64_t deadline = now_us() + (uint64_t)run->ask.wall_ms * 1000, now;
    while (room->call) {
        bool more = run->sent < run->ask.body;
        struct pollfd ready[2 + OUTPUTS] = { { CTL_FD, POLLIN, 0 }, { keeper->signals, POLLIN, 0 } };
        for (int i = 0; i < OUTPUTS; i++)
            ready[2 + i] = (struct pollfd){ run->outputs[i].fd, POLLIN, 0 };
        if (more)
            ready[2].events |= POLLOUT;
        if ((now = now_us()) >= deadline) {
            run->done.timed_out = true;
            return;
        }
        uint64_t wait = (deadline - now + 999) / 1000;
        poll(ready, 2 + OUTPUTS, wait > 3600000 ? 3600000 : (int)wait);
        if (ready[0].revents) {
            take_order();
            return;
        }
        if (ready[2].revents & POLLOUT)
            feed(run, room->line);
        for (int i = 0; i < OUTPUTS; i++)
            if (ready[2 + i].revents & ~POLLOUT)
                take(run, &run->outputs[i]);
        if (ready[1].revents)
            room_reap(keeper, room);
    }
}

/* --- what is brought back -------------------------------------------------------------------------- */

/* A regular file below the call's directory; the call may have made a link of it, or a FIFO. */
static int open_file(int work, const char *path)
{
    struct {
        uint64_t flags, mode, resolve;
    } how = {
        .flags = O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC,
        .resolve = 0x01 | 0x02 | 0x08, /* RESOLVE_NO_XDEV | NO_MAGICLINKS | BENEATH */
    };
    struct stat st;
    int fd = (int)syscall(SYS_openat2, work, path, &how, sizeof how);
    if (fd >= 0 && (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode))) {
        close(fd);
        fd = -1;
    }
    return fd;
}

/* One file into `to`, behind its index and size; the bytes used, 0 when there is none or no room. */
static size_t bring(struct running *run, int fd, uint32_t index, uint8_t *to, size_t room)
{
    uint32_t head[2] = { index, 0 };
    size_t limit = run->ask.output_limit, at = sizeof head;
    if (room > sizeof head + limit)
        room = sizeof head + limit;
    ssize_t n = 1;
    while (room > at && (n = read(fd, to + at, room - at)) > 0)
        at += (size_t)n;
    uint8_t beyond;
    if (room < sizeof head || n < 0 || read(fd, &beyond, 1) > 0) {
        run->done.truncated = true;
        return 0;
    }
    head[1] = (uint32_t)(at - sizeof head);
    memcpy(to, head, sizeof head);
    return at;
}

static void bring_files(struct running *run, int work, size_t used)
{
    const char *path = (const char *)run->text, *end = path + run->ask.paths;
    run->room = run->ask.answer_limit > used ? run->ask.answer_limit - used : 0;
    if (!run->ask.paths || !run->room || end[-1] || !(run->files = map_alloc(run->room)))
        return;
    for (uint32_t index = 0; path < end; index++, path += strlen(path) + 1) {
        int fd = open_file(work, path);
        if (fd < 0)
            continue;
        uint32_t *n = &run->done.files;
        *n += (uint32_t)bring(run, fd, index, run->files + *n, run->room - *n);
        close(fd);
    }
}

static void answer(const struct keeper *keeper, struct room *room, struct running *run)
{
    size_t used = 0;
    for (int i = 0; i < OUTPUTS; i++) {
        while (run->outputs[i].fd >= 0 && take(run, &run->outputs[i]))
            ; /* its writers are gone */
        run->done.outputs[i] = (uint32_t)run->outputs[i].n;
        used += run->outputs[i].n;
    }
    bring_files(run, room->work, used);
    run->done.status = room->status;
    if (WIFEXITED(room->status))
        run->done.timed_out = false; /* it ended by itself at the last moment */
    run->done.dirty = !network_clean(keeper);
    struct iovec parts[2 + OUTPUTS] = { { &run->done, sizeof run->done } };
    for (int i = 0; i < OUTPUTS; i++)
        parts[1 + i] = (struct iovec){ run->outputs[i].kept, run->outputs[i].n };
    parts[1 + OUTPUTS] = (struct iovec){ run->files, run->done.files };
    channel_write(parts, 2 + OUTPUTS);
}

_Noreturn void fncall_loop(const struct keeper *keeper)
{
    static struct running run;
    uint64_t at[4] = { now_us() };
    for (int i = 0; i < OUTPUTS; i++)
        if (!(run.outputs[i].kept = map_alloc(MAX_OUTPUT)))
            child_fail(EXHAUSTED, "no memory for outputs");
    for (;;) {
        struct room room;
        room_open(keeper, &room);
        struct ready ready = { .kind = ANSWER_READY, .took_us = (uint32_t)(now_us() - at[0]) };
        channel_write(&(struct iovec){ &ready, sizeof ready }, 1);
        receive(keeper, &room, &run);
        int fds[OUTPUTS] = { room.line, room.out, room.err };
        for (int i = 0; i < OUTPUTS; i++)
            run.outputs[i] = (struct output){ run.outputs[i].kept, 0, fds[i] };
        at[1] = now_us();
        feed(&run, room.line);
        at[2] = now_us();
        follow(keeper, &room, &run);
        at[3] = now_us();
        room_empty(keeper, &room);
        at[0] = now_us();
        run.done.started_us = (uint32_t)(at[2] - at[1]);
        run.done.run_us = (uint32_t)(at[3] - at[2]);
        run.done.emptied_us = (uint32_t)(at[0] - at[3]);
        answer(keeper, &room, &run);
        room_close(&room);
        map_free(run.text, text_size(&run));
        map_free(run.files, run.room);
    }
}
