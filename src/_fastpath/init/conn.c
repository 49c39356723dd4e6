#include "conn.h"

#include <errno.h>
#include <string.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "config.h"
#include "port.h"

static struct conn *conns;
static struct source listener;
static int reserve_fd = -1; /* given up for a moment to refuse a peer when descriptors ran out */

static void conn_ready(struct source *source, uint32_t events);

static void conn_interest(struct conn *conn)
{
    uint32_t events = 0;
    if (conn->tx_len <= TX_HIGH && !conn->held_until)
        events |= EPOLLIN;
    if (conn->tx_len)
        events |= EPOLLOUT;
    /* Without any interest a hang-up would still have to be seen. */
    source_watch(&conn->io, events ? events : EPOLLRDHUP);
}

static bool peer_is_ours(int fd)
{
    struct ucred peer;
    socklen_t n = sizeof peer;
    if (config.any_peer)
        return true;
    /* Only processes of other PID namespaces, that is of the host, have no pid here. */
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &n) == 0 && peer.pid == 0;
}

bool conn_begin(struct conn *conn)
{
    conn->rx = map_alloc(RX_SMALL);
    if (!conn->rx)
        return false;
    clock_go(); /* who paused the sandbox may not have come to freezing it */
    conn->rx_cap = RX_SMALL;
    conn->io.ready = conn_ready;
    source_watch(&conn->io, EPOLLIN);
    return true;
}

static bool conn_adopt(int fd, bool port)
{
    struct conn *conn = conns;
    while (conn < conns + MAX_CONNS && conn->used)
        conn++;
    if (conn == conns + MAX_CONNS || !source_open(&conn->io, fd, EPOLLIN, conn_ready)) {
        close(fd);
        return false;
    }
    conn->used = true;
    conn->port = port;
    if (port)
        port_await(conn);
    else if (!conn_begin(conn))
        conn_doom(conn);
    return true;
}

static void refuse_without_descriptors(void)
{
    close(reserve_fd);
    int fd = accept4(listener.fd, NULL, NULL, SOCK_CLOEXEC);
    if (fd >= 0)
        close(fd);
    reserve_fd = open("/", O_PATH | O_CLOEXEC);
}

static void listener_ready(struct source *source, uint32_t events)
{
    (void)events;
    int fd = accept4(source->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0 && (errno == EMFILE || errno == ENFILE))
        refuse_without_descriptors();
    if (fd < 0)
        return;
    if (peer_is_ours(fd))
        conn_adopt(fd, false);
    else
        close(fd);
}

bool conn_table_open(void)
{
    conns = table_alloc(MAX_CONNS * sizeof *conns);
    return conns != NULL;
}

bool conns_open(int listen_fd)
{
    int listening = 0;
    socklen_t n = sizeof listening;
    if (reserve_fd < 0)
        reserve_fd = open("/", O_PATH | O_CLOEXEC);
    fcntl(listen_fd, F_SETFL, O_NONBLOCK);
    bool is_socket = getsockopt(listen_fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &n) == 0;
    if (listening)
        return source_open(&listener, listen_fd, EPOLLIN, listener_ready);
    return conn_adopt(listen_fd, !is_socket); /* one stream: connected already, or a VM's serial port */
}

static void drop_fds(struct conn *conn)
{
    while (conn->n_fds)
        close(conn->fds[--conn->n_fds]);
}

bool conn_take_fds(struct conn *conn, int *fds, unsigned n)
{
    if (conn->n_fds != n)
        return false;
    memcpy(fds, conn->fds, n * sizeof *fds);
    conn->n_fds = 0;
    return true;
}

static void conn_close(struct conn *conn)
{
    calls_drop(conn);
    drop_fds(conn);
    map_free(conn->rx, conn->rx_cap);
    map_free(conn->tx, conn->tx_cap);
    if (!conn->port) {
        source_close(&conn->io);
        memset(conn, 0, sizeof *conn);
        return;
    }
    bool ended = conn->ended;
    *conn = (struct conn){ .io = conn->io, .used = true, .port = true };
    if (ended)
        port_await(conn);
    else
        port_ignore(conn);
}

void conn_doom(struct conn *conn)
{
    conn->doomed = true;
}

bool conn_room(const struct conn *conn)
{
    return !conn->doomed && conn->tx_len < TX_HIGH;
}

/* Make room for `n` more bytes behind what is queued. */
static bool tx_reserve(struct conn *conn, size_t n)
{
    if (conn->tx_start && conn->tx_start + conn->tx_len + n > conn->tx_cap) {
        memmove(conn->tx, conn->tx + conn->tx_start, conn->tx_len);
        conn->tx_start = 0;
    }
    if (conn->tx_len + n <= conn->tx_cap)
        return true;
    size_t cap = (conn->tx_len + n + 0xffff) & ~(size_t)0xffff;
    uint8_t *grown = map_resize(conn->tx, conn->tx_cap, cap);
    if (!grown)
        return false;
    conn->tx = grown;
    conn->tx_cap = cap;
    return true;
}

void conn_send(struct conn *conn, const void *frame, size_t n)
{
    const uint8_t *p = frame;
    if (conn->doomed)
        return;
    if (!conn->tx_len) {
        ssize_t sent = conn->port ? write(conn->io.fd, p, n)
                                  : send(conn->io.fd, p, n, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && errno != EAGAIN && errno != EINTR) {
            conn_doom(conn);
            return;
        }
        if (sent > 0) {
            p += sent;
            n -= (size_t)sent;
        }
    }
    if (!n)
        return;
    if (!tx_reserve(conn, n)) {
        conn_doom(conn); /* half a frame went out and there is no memory for the rest */
        return;
    }
    memcpy(conn->tx + conn->tx_start + conn->tx_len, p, n);
    conn->tx_len += n;
    conn_interest(conn);
}

static void pump_calls(struct conn *conn)
{
    struct call *next;
    for (struct call *call = conn->calls; call && conn_room(conn); call = next) {
        next = call->next;
        if (call->ops && call->ops->pump)
            call->ops->pump(call);
    }
}

static void conn_flush(struct conn *conn)
{
    while (conn->tx_len) {
        ssize_t n = write(conn->io.fd, conn->tx + conn->tx_start, conn->tx_len);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno != EAGAIN)
            conn_doom(conn);
        if (n <= 0)
            break;
        conn->tx_start += (size_t)n;
        conn->tx_len -= (size_t)n;
    }
    if (!conn->tx_len) {
        map_free(conn->tx, conn->tx_cap);
        conn->tx = NULL;
        conn->tx_cap = conn->tx_start = 0;
    }
    if (conn->tx_len < TX_HIGH / 2)
        pump_calls(conn);
}

/* Handle the complete frames in the buffer; keep at most one incomplete one. */
static void conn_process(struct conn *conn)
{
    size_t at = 0;
    if (conn->processing)
        return;
    conn->processing = true;
    while (!conn->doomed && !conn->held_until && conn->tx_len <= TX_HIGH) {
        if (conn->rx_len - at < 4)
            break;
        const uint8_t *p = conn->rx + at;
        size_t n = (size_t)p[0] << 24 | (size_t)p[1] << 16 | (size_t)p[2] << 8 | p[3];
        if (n > MAX_FRAME) {
            conn_doom(conn);
            break;
        }
        if (conn->rx_len - at - 4 < n)
            break;
        if (!dispatch(conn, (struct mp_bytes){ p + 4, n }))
            conn_doom(conn);
        at += 4 + n;
    }
    conn->processing = false;
    conn->rx_len -= at;
    if (at && conn->rx_len)
        memmove(conn->rx, conn->rx + at, conn->rx_len);
    if (!conn->rx_len)
        drop_fds(conn); /* the frame that they came with had no use for them */
}

/* Bytes the buffer must hold for the frame at its start to become complete. */
static size_t rx_wanted(const struct conn *conn)
{
    const uint8_t *p = conn->rx;
    if (conn->rx_len < 4)
        return RX_SMALL;
    size_t n = 4 + ((size_t)p[0] << 24 | (size_t)p[1] << 16 | (size_t)p[2] << 8 | p[3]);
    return n < RX_SMALL ? RX_SMALL : n;
}

static bool rx_fit(struct conn *conn)
{
    size_t wanted = (rx_wanted(conn) + 4095) & ~(size_t)4095;
    if (wanted > MAX_FRAME + 4096) /* what announces more is not read, whoever looks first */
        return false;
    bool shrink = conn->rx_cap > RX_SMALL && conn->rx_len == 0;
    if (wanted <= conn->rx_cap && !shrink)
        return true;
    uint8_t *fitted = map_resize(conn->rx, conn->rx_cap, wanted);
    if (!fitted)
        return false;
    conn->rx = fitted;
    conn->rx_cap = wanted;
    return true;
}

/* Descriptors come with the first of the bytes they were sent with. The kernel closes those that the room
 * for them does not hold, and we those that nobody took before the next come: a peer cannot fill our
 * table. */
static ssize_t conn_receive(struct conn *conn, void *to, size_t room)
{
    if (conn->port)
        return read(conn->io.fd, to, room);
    union {
        struct cmsghdr align;
        char room[CMSG_SPACE(sizeof conn->fds)];
    } control;
    struct iovec part = { to, room };
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1,
        .msg_control = control.room, .msg_controllen = sizeof control.room,
    };
    ssize_t n = recvmsg(conn->io.fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    struct cmsghdr *c = n < 0 ? NULL : CMSG_FIRSTHDR(&message);
    if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
        drop_fds(conn);
        conn->n_fds = (unsigned)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        memcpy(conn->fds, CMSG_DATA(c), conn->n_fds * sizeof(int));
    }
    return n;
}

static void conn_read(struct conn *conn)
{
    for (int rounds = 0; rounds < 8 && !conn->doomed; rounds++) {
        if (conn->held_until || conn->tx_len > TX_HIGH)
            break;
        if (conn->rx_len == conn->rx_cap && !rx_fit(conn)) {
            conn_doom(conn);
            break;
        }
        size_t room = conn->rx_cap - conn->rx_len;
        ssize_t n = conn_receive(conn, conn->rx + conn->rx_len, room);
        if (n < 0 && errno == EINTR)
            continue;
        conn->ended = n == 0;
        if (n == 0 || (n < 0 && errno != EAGAIN))
            conn_doom(conn);
        if (n <= 0)
            break;
        conn->rx_len += (size_t)n;
        conn_process(conn);
        if (!conn->doomed && conn->rx_len && !rx_fit(conn))
            conn_doom(conn);
        if (!conn->port && (size_t)n < room) /* a port gives a page at a time */
            break; /* drained: saves the read that would say EAGAIN */
    }
    if (!conn->doomed)
        rx_fit(conn);
}

static void conn_ready(struct source *source, uint32_t events)
{
    struct conn *conn = owner_of(source, struct conn, io);
    if (events & EPOLLOUT)
        conn_flush(conn);
    if (conn->rx_len)
        conn_process(conn); /* frames that waited for room */
    if (events & EPOLLIN)
        conn_read(conn);
    else if (events & (EPOLLHUP | EPOLLERR | EPOLLRDHUP))
        conn_doom(conn);
    if (!conn->doomed)
        conn_interest(conn);
}

void conn_hold(struct conn *conn)
{
    conn->held_until = now_us() + HOLD_US;
}

static void conn_release(struct conn *conn)
{
    if (!conn->held_until)
        return;
    conn->held_until = 0;
    conn_process(conn);
    if (!conn->doomed)
        conn_interest(conn);
}

uint64_t conns_tick(uint64_t now)
{
    uint64_t due = 0;
    for (struct conn *conn = conns; conn < conns + MAX_CONNS; conn++) {
        if (!conn->used)
            continue;
        if (conn->held_until && now >= conn->held_until) {
            conn_release(conn);
            due = now; /* what was released may have deadlines that this round did not look at */
        }
        if (conn->doomed)
            conn_close(conn);
        else if (conn->held_until && (!due || conn->held_until < due))
            due = conn->held_until;
    }
    return due;
}
