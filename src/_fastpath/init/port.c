#include "port.h"

#include <errno.h>
#include <poll.h>
#include <unistd.h>

#define ROUNDS 16

/* While nobody is at the other end the port is ready to be read (the end) and hung up, all the time: a
 * level would keep us busy. Whoever opens the other end wakes all that wait for the port (virtio_console.c
 * in the kernel), and so does whatever it sends. */
#define ARRIVAL (EPOLLIN | EPOLLOUT | EPOLLET)

static void arrival_ready(struct source *source, uint32_t events)
{
    struct conn *conn = owner_of(source, struct conn, io);
    struct pollfd port = { .fd = source->fd, .events = POLLIN };
    (void)events;
    if (poll(&port, 1, 0) >= 0 && !(port.revents & POLLHUP))
        conn_begin(conn); /* without memory for it: the peer gets no answer, and comes again */
}

void port_await(struct conn *conn)
{
    conn->io.ready = arrival_ready;
    source_watch(&conn->io, ARRIVAL); /* reports at once what is there already */
}

static void ignored_ready(struct source *source, uint32_t events)
{
    struct conn *conn = owner_of(source, struct conn, io);
    (void)events;
    for (int round = 0; round < ROUNDS; round++) {
        ssize_t n = read(source->fd, scratch, READ_CHUNK);
        if (n > 0) {
            scratch_used((size_t)n);
            continue;
        }
        if (n == 0)
            port_await(conn);
        else if (errno != EAGAIN && errno != EINTR)
            source_watch(source, 0); /* the device was taken away */
        return;
    }
}

void port_ignore(struct conn *conn)
{
    conn->io.ready = ignored_ready;
    source_watch(&conn->io, EPOLLIN);
}
