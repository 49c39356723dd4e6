/* dsec-spawner: carries out the plans of dsecd, one message at a time.
 *
 *     dsec-spawner FD INIT FILTER [by-path]
 *
 * FD: SOCK_SEQPACKET to the daemon, INIT: path of dsec-init, FILTER: descriptor of the system call filter
 * of all it makes, by-path: what overlayfs stacks is attached for a moment (host.h).
 *
 * A message is the msgpack array [id, op, plan], with the plan's descriptors beside it; the answer is
 * [id, SpawnReply], with the pidfd of a new container, or the mount namespace and the upper of a
 * re-rooted one, beside it. It ends when the daemon closes the
 * socket or dies; containers live on. It decides nothing and keeps nothing between messages.
 */
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>

#include "native/filter.h"
#include "native/kernel.h"
#include "spawner/create.h"
#include "spawner/destroy.h"
#include "spawner/host.h"
#include "spawner/plan.h"
#include "spawner/reroot.h"

enum op { OP_CREATE, OP_DESTROY, OP_STAGE, OP_REROOT };

struct message {
    uint64_t id;
    uint64_t op;
    int fds[FDS_MAX];
    uint32_t fd_count;
    struct mp_reader plan;
};

/* All of the process's memory that stays: only a look for links allocates, and frees it (links.c). */
struct spawner {
    int control;
    struct host host;
    struct arena arena;
    struct container_plan container;
    struct stage_plan stage;
    struct creation creation;
    struct destruction destructions[DESTROYS_MAX];
    uint8_t input[MESSAGE_MAX];
    uint8_t output[8192];
};

#define REPLY_FDS 2

struct reply {
    uint64_t id;
    pid_t pid;
    int fds[REPLY_FDS];
    uint32_t fd_count;
    int error; /* negative errno */
    const char *step;
    const char *where; /* a path of the plan that the step failed at, NULL: none */
    const struct steps *times; /* NULL: none */
    bool clean, linked;
};

static void put_times(struct mp_writer *writer, const struct steps *steps)
{
    mp_put_text(writer, "micros");
    mp_put_map(writer, steps->count);
    for (uint32_t i = 0; i < steps->count; i++) {
        mp_put_text(writer, steps->times[i].name);
        mp_put_u64(writer, (steps->times[i].ns + 500) / 1000);
    }
}

static void answer(struct spawner *spawner, const struct reply *reply)
{
    struct mp_writer writer = mp_writer_of(spawner->output, sizeof spawner->output);
    bool timed = reply->times && reply->times->trace;

    mp_put_array(&writer, 2);
    mp_put_u64(&writer, reply->id);
    mp_put_map(&writer, 3u + timed + reply->clean + reply->linked + (reply->where != NULL));
    mp_put_text(&writer, "pid");
    mp_put_u64(&writer, (uint64_t)reply->pid);
    mp_put_text(&writer, "error");
    mp_put_u64(&writer, (uint64_t)-reply->error);
    mp_put_text(&writer, "step");
    mp_put_text(&writer, reply->step);
    if (reply->where) {
        mp_put_text(&writer, "where");
        mp_put_text(&writer, reply->where);
    }
    if (timed)
        put_times(&writer, reply->times);
    if (reply->clean) {
        mp_put_text(&writer, "clean");
        mp_put_bool(&writer, true);
    }
    if (reply->linked) {
        mp_put_text(&writer, "linked");
        mp_put_bool(&writer, true);
    }

    struct iovec part = { spawner->output, mp_written(&writer) };
    struct msghdr header = { .msg_iov = &part, .msg_iovlen = 1 };
    _Alignas(struct cmsghdr) char ancillary[CMSG_SPACE(sizeof reply->fds)] = { 0 };
    if (reply->fd_count) {
        size_t bytes = reply->fd_count * sizeof(int);
        header.msg_control = ancillary;
        header.msg_controllen = CMSG_SPACE(bytes);
        struct cmsghdr *cmsg = CMSG_FIRSTHDR(&header);
        cmsg->cmsg_level = SOL_SOCKET;
        cmsg->cmsg_type = SCM_RIGHTS;
        cmsg->cmsg_len = CMSG_LEN(bytes);
        memcpy(CMSG_DATA(cmsg), reply->fds, bytes);
    }
    while (sendmsg(spawner->control, &header, MSG_NOSIGNAL) < 0)
        if (errno != EINTR)
            exit(1); /* the daemon is gone; its journal knows what it had asked for */
}

/* Before the answer: who hears that all is undone may look. */
static void drop_fds(struct message *message)
{
    for (uint32_t i = 0; i < message->fd_count; i++)
        close(message->fds[i]);
    message->fd_count = 0;
}

/* What a reply carries is the receiver's from then on. */
static void answer_with_fds(struct spawner *spawner, const struct reply *reply)
{
    answer(spawner, reply);
    for (uint32_t i = 0; i < reply->fd_count; i++)
        close(reply->fds[i]);
}

static void create(struct spawner *spawner, struct message *message)
{
    struct creation *c = &spawner->creation;
    struct reply reply = { .id = message->id, .step = "plan" };

    reply.error = read_container_plan(&message->plan, &spawner->arena, &spawner->container);
    if (reply.error == 0 && message->fd_count != FDS_GIVEN + spawner->container.lowers)
        reply.error = -EBADMSG;
    if (reply.error == 0) {
        reply.error = create_container(c, &spawner->host, &spawner->container, message->fds);
        reply.step = reply.error ? c->steps.current : "";
        reply.where = reply.error ? c->where : NULL;
        reply.times = &c->steps;
    }
    if (reply.error == 0) {
        reply.pid = c->pid;
        reply.fds[reply.fd_count++] = c->pidfd;
    }
    drop_fds(message);
    answer_with_fds(spawner, &reply);
}

static void reroot(struct spawner *spawner, struct message *message)
{
    struct creation *c = &spawner->creation;
    struct reply reply = { .id = message->id, .step = "plan" };

    reply.error = read_reroot_plan(&message->plan, &spawner->arena, &spawner->container);
    if (reply.error == 0 && message->fd_count != FDS_GIVEN + spawner->container.lowers)
        reply.error = -EBADMSG;
    if (reply.error == 0) {
        reply.error = reroot_container(c, &spawner->host, &spawner->container, message->fds);
        reply.step = reply.error ? c->steps.current : "";
        reply.where = reply.error ? c->where : NULL;
        reply.times = &c->steps;
    }
    if (reply.error == 0) {
        reply.fds[reply.fd_count++] = c->fd[FD_NS_MNT];
        reply.fds[reply.fd_count++] = c->fd[FD_UPPER];
        reply.linked = c->linked;
    }
    drop_fds(message);
    answer_with_fds(spawner, &reply);
}

static void advance(struct spawner *spawner, struct destruction *d, int error)
{
    if (error == 0)
        error = finish_destroy(d, &spawner->host);
    if (error == -EAGAIN)
        return;
    close_if(&d->pidfd);
    close_if(&d->netns);
    d->running = false;
    struct reply reply = { .id = d->request, .error = error,
                           .step = error ? d->step : "", .clean = error == 0 && d->clean };
    answer(spawner, &reply);
}

static void destroy(struct spawner *spawner, struct message *message)
{
    struct destruction *d = spawner->destructions;
    struct reply refusal = { .id = message->id, .error = -EBADMSG, .step = "plan" };

    while (d < spawner->destructions + DESTROYS_MAX && d->running)
        d++;
    if (d == spawner->destructions + DESTROYS_MAX) {
        refusal.error = -EBUSY;
        answer(spawner, &refusal);
    } else if (read_destroy_plan(&message->plan, &d->arena, &d->plan) < 0 ||
               message->fd_count > 1u + d->plan.netns || message->fd_count < d->plan.netns) {
        answer(spawner, &refusal);
    } else {
        d->running = true;
        d->request = message->id;
        d->netns = d->plan.netns ? message->fds[message->fd_count - 1] : -1;
        d->pidfd = message->fd_count > d->plan.netns ? message->fds[0] : -1;
        d->looks = 0;
        message->fd_count = 0; /* taken over */
        advance(spawner, d, begin_destroy(d, &spawner->host));
    }
}

/* Enter the v1 groups of the next container, which inherits them: a write to cgroup.procs can take a
 * whole RCU grace period, so it must not be in the path of the creation. */
static void stage(struct spawner *spawner, struct message *message)
{
    struct reply reply = { .id = message->id, .step = "plan" };

    reply.error = read_stage_plan(&message->plan, &spawner->arena, &spawner->stage);
    for (uint32_t i = 0; i < spawner->stage.count && reply.error == 0; i++) {
        reply.step = spawner->stage.procs[i];
        reply.error = host_write(&spawner->host, spawner->stage.procs[i], "0");
    }
    answer(spawner, &reply);
}

static void dispatch(struct spawner *spawner, struct message *message)
{
    struct reply refusal = { .id = message->id, .error = -EBADMSG, .step = "message" };

    if (message->plan.failed)
        answer(spawner, &refusal);
    else if (message->op == OP_CREATE)
        create(spawner, message);
    else if (message->op == OP_DESTROY)
        destroy(spawner, message);
    else if (message->op == OP_STAGE)
        stage(spawner, message);
    else if (message->op == OP_REROOT)
        reroot(spawner, message);
    else
        answer(spawner, &refusal);
    drop_fds(message);
}

static void take_fds(struct message *message, struct msghdr *header)
{
    for (struct cmsghdr *cmsg = CMSG_FIRSTHDR(header); cmsg; cmsg = CMSG_NXTHDR(header, cmsg)) {
        if (cmsg->cmsg_level != SOL_SOCKET || cmsg->cmsg_type != SCM_RIGHTS)
            continue;
        size_t count = (cmsg->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        memcpy(message->fds, CMSG_DATA(cmsg), count * sizeof(int));
        message->fd_count = (uint32_t)count;
    }
}

static bool serve_one(struct spawner *spawner)
{
    static _Alignas(struct cmsghdr) char ancillary[CMSG_SPACE(sizeof(int) * FDS_MAX)];
    struct iovec part = { spawner->input, sizeof spawner->input };
    struct msghdr header = { .msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = ancillary,
                             .msg_controllen = sizeof ancillary };
    struct message message = { .fd_count = 0 };

    ssize_t size = recvmsg(spawner->control, &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (size < 0)
        return errno == EINTR || errno == EAGAIN;
    if (size == 0)
        return false;
    take_fds(&message, &header);
    message.plan = mp_reader_of(spawner->input, (size_t)size);
    if (mp_get_array(&message.plan) != 3 || header.msg_flags & (MSG_TRUNC | MSG_CTRUNC))
        message.plan.failed = true;
    message.id = mp_get_u64(&message.plan);
    message.op = mp_get_u64(&message.plan);
    dispatch(spawner, &message);
    return true;
}

/* Wait for a message or for a dying container; true when a message is there. */
static bool await(struct spawner *spawner)
{
    struct pollfd entries[1 + DESTROYS_MAX] = { { .fd = spawner->control, .events = POLLIN } };
    int count = 1, timeout = -1;
    uint64_t now = now_ns();

    for (struct destruction *d = spawner->destructions;
         d < spawner->destructions + DESTROYS_MAX; d++) {
        if (!d->running)
            continue;
        int64_t left = d->deadline_ns > now ? (int64_t)(d->deadline_ns - now) / 1000000 + 1 : 0;
        int wait = d->pidfd >= 0 ? (int)left : RETRY_MS;
        timeout = timeout < 0 || wait < timeout ? wait : timeout;
        if (d->pidfd >= 0)
            entries[count++] = (struct pollfd){ .fd = d->pidfd, .events = POLLIN };
    }
    if (poll(entries, (nfds_t)count, timeout) < 0)
        return false;
    for (struct destruction *d = spawner->destructions;
         d < spawner->destructions + DESTROYS_MAX; d++)
        if (d->running)
            advance(spawner, d, 0);
    return entries[0].revents != 0;
}

static void set_signals(void)
{
    static const int ignored[] = { SIGCHLD, SIGPIPE, SIGINT, SIGTERM };
    for (unsigned i = 0; i < sizeof ignored / sizeof *ignored; i++)
        signal(ignored[i], SIG_IGN); /* SIGCHLD: the kernel reaps; the others are the daemon's */
}

static int start(struct spawner *spawner, const char *init, int filter, const char **step)
{
    *step = "seccomp";
    int error = install_filter(filter);
    close(filter);
    return error < 0 ? error : enter_host(&spawner->host, init, step);
}

int main(int argc, char **argv)
{
    static struct spawner spawner;
    const char *step = "";

    if (argc < 5 || argc > 6 || (argc == 6 && strcmp(argv[5], "by-path") != 0)) {
        fputs("usage: dsec-spawner FD INIT FILTER SHELL [by-path]\n", stderr);
        return 2;
    }
    spawner.control = atoi(argv[1]);
    spawner.host.shell = atoi(argv[4]);
    spawner.host.by_path = argc == 6;
    set_signals();
    fcntl(spawner.control, F_SETFD, FD_CLOEXEC);
    if (spawner.host.shell >= 0)
        fcntl(spawner.host.shell, F_SETFD, FD_CLOEXEC);
    prctl(PR_SET_NAME, "dsec-spawner");
    struct reply ready = { .fd_count = 0 };
    ready.error = start(&spawner, argv[2], atoi(argv[3]), &step);
    ready.step = step;
    ready.pid = getpid();
    answer(&spawner, &ready);
    if (ready.error)
        return 1;
    for (;;)
        if (await(&spawner) && !serve_one(&spawner))
            return 0;
}
