#include "blobd/control.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "blobd/log.h"

#define CLIENTS_MAX 16

static int clients[CLIENTS_MAX];
static int client_count;
static uint8_t frame[FRAME_MAX], result[FRAME_MAX], answer[FRAME_MAX + 1024];

int control_listen(const char *path)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    if (fd < 0 || strlen(path) >= sizeof address.sun_path)
        return fd < 0 ? -errno : -ENAMETOOLONG;
    strcpy(address.sun_path, path);
    unlink(path);
    mode_t before = umask(0177);
    int result_code = bind(fd, (struct sockaddr *)&address, sizeof address);
    umask(before);
    if (result_code < 0 || listen(fd, CLIENTS_MAX) < 0)
        return -errno;
    return fd;
}

static void take_client(int listener)
{
    struct ucred peer;
    socklen_t size = sizeof peer;
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

    if (fd < 0)
        return;
    if (client_count == CLIENTS_MAX || getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) < 0 ||
        peer.uid != geteuid()) {
        close(fd);
        return;
    }
    clients[client_count++] = fd;
}

static bool send_answer(int fd, const struct call *call, uint64_t number)
{
    struct mp_writer w = mp_writer_of(answer, sizeof answer);

    mp_put_array(&w, 3);
    mp_put_u64(&w, number);
    if (call->code) {
        mp_put_map(&w, 2);
        mp_put_text(&w, "code");
        mp_put_text(&w, call->code);
        mp_put_text(&w, "message");
        mp_put_text(&w, call->message);
        mp_put_nil(&w);
    } else {
        mp_put_nil(&w);
        mp_put_raw(&w, result, mp_written(&call->out));
    }
    struct iovec part = { answer, mp_written(&w) };
    struct msghdr header = { .msg_iov = &part, .msg_iovlen = 1 };
    _Alignas(struct cmsghdr) char ancillary[CMSG_SPACE(sizeof(int))] = { 0 };
    if (call->fd >= 0 && !call->code) {
        header.msg_control = ancillary;
        header.msg_controllen = sizeof ancillary;
        struct cmsghdr *cmsg = CMSG_FIRSTHDR(&header);
        cmsg->cmsg_level = SOL_SOCKET;
        cmsg->cmsg_type = SCM_RIGHTS;
        cmsg->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(cmsg), &call->fd, sizeof(int));
    }
    /* A client that does not read its answers is dropped rather than waited for. */
    return !w.overflow && sendmsg(fd, &header, MSG_NOSIGNAL) >= 0;
}

/* One request of a client. False: the connection is to be closed. */
static bool serve_client(int fd, bool *end)
{
    ssize_t n = recv(fd, frame, sizeof frame, MSG_TRUNC);

    if (n < 0)
        return errno == EAGAIN || errno == EINTR;
    if (n == 0 || (size_t)n > sizeof frame)
        return false;
    struct call call = { .args = mp_reader_of(frame, (size_t)n), .fd = -1,
                         .out = mp_writer_of(result, sizeof result) };
    if (mp_get_array(&call.args) != 3)
        return false;
    uint64_t number = mp_get_u64(&call.args);
    struct mp_bytes operation = mp_get_str(&call.args);
    struct mp_reader rest = call.args;
    if (call.args.failed || !mp_skip(&rest) || !mp_finished(&rest))
        return false;
    call_run(&call, operation, (struct mp_bytes){ frame, (size_t)n });
    if (!call.code && call.out.overflow)
        call_fail(&call, "internal", "the answer is too large");
    *end = call.end && !call.code;
    return send_answer(fd, &call, number);
}

void control_serve(int listener)
{
    for (bool end = false; !end;) {
        struct pollfd entries[CLIENTS_MAX + 1] = { { .fd = listener, .events = POLLIN } };
        int count = client_count;
        for (int i = 0; i < count; i++)
            entries[i + 1] = (struct pollfd){ .fd = clients[i], .events = POLLIN };
        if (poll(entries, (nfds_t)count + 1, -1) < 0)
            continue;
        for (int i = count - 1; i >= 0 && !end; i--) {
            if (!entries[i + 1].revents || serve_client(clients[i], &end))
                continue;
            close(clients[i]);
            clients[i] = clients[--client_count];
        }
        if (entries[0].revents)
            take_client(listener);
    }
}
