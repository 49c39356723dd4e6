/* net.forward: a TCP connection to a port on the sandbox's loopback. init is in its network
 * namespace, so it connects by itself. */
#include "transfer.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <sys/socket.h>
#include <string.h>
#include <unistd.h>

static int connect_loopback(uint16_t port, bool v6)
{
    struct sockaddr_in a4 = { .sin_family = AF_INET, .sin_port = htons(port),
                              .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    struct sockaddr_in6 a6 = { .sin6_family = AF_INET6, .sin6_port = htons(port),
                               .sin6_addr = IN6ADDR_LOOPBACK_INIT };
    int fd = socket(v6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    int done = v6 ? connect(fd, (struct sockaddr *)(void *)&a6, sizeof a6)
                  : connect(fd, (struct sockaddr *)(void *)&a4, sizeof a4);
    if (done == 0 || errno == EINPROGRESS)
        return fd;
    int err = errno;
    close(fd);
    return -err;
}

static void refused(struct transfer *t, int err)
{
    struct failure failure = { .code = "unavailable" };
    snprintf(failure.message, sizeof failure.message,
             "nothing answers on port %u of the sandbox's loopback: %s", t->port, strerror(err));
    transfer_fail(t, &failure);
}

/* Try 127.0.0.1, then ::1; `err` is what the attempt before said. */
static void forward_connect(struct transfer *t, int err)
{
    for (;; t->v6 = true) {
        source_close(&t->from);
        source_close(&t->to);
        int fd = connect_loopback(t->port, t->v6);
        int writer = fd >= 0 ? fcntl(fd, F_DUPFD_CLOEXEC, 0) : -1;
        if (fd >= 0 && writer >= 0) {
            t->connecting = true;
            source_open(&t->from, fd, 0, transfer_from_ready);
            if (source_open(&t->to, writer, EPOLLOUT, transfer_to_ready))
                return;
            close(writer);
        }
        if (!err || fd >= 0)
            err = fd < 0 ? -fd : errno;
        if (t->v6 || fd >= 0)
            break;
    }
    refused(t, err);
}

bool forward_connected(struct transfer *t)
{
    int err = 0;
    socklen_t n = sizeof err;
    getsockopt(t->to.fd, SOL_SOCKET, SO_ERROR, &err, &n);
    if (!err) {
        t->connecting = false;
        return true;
    }
    if (!t->v6) {
        t->v6 = true;
        forward_connect(t, err);
        return false;
    }
    refused(t, err);
    return false;
}

void forward_start(struct call *call, uint16_t port)
{
    struct transfer *t = transfer_new(call);
    if (!t) {
        call_fail(call, "exhausted", "%d transfers are running", MAX_TRANSFERS);
        return;
    }
    t->forward = true;
    t->port = port;
    forward_connect(t, 0);
}
