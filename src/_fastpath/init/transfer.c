#include "transfer.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "job.h"
#include "leaver.h"
#include "vm.h"

static struct transfer *transfers;
static const struct call_ops transfer_ops;

bool transfer_table_open(void)
{
    transfers = table_alloc(MAX_TRANSFERS * sizeof *transfers);
    return transfers != NULL;
}

struct transfer *transfer_new(struct call *call)
{
    struct transfer *t = transfers;
    while (t < transfers + MAX_TRANSFERS && t->used)
        t++;
    if (t == transfers + MAX_TRANSFERS)
        return NULL;
    memset(t, 0, sizeof *t);
    t->used = true;
    t->ctl.fd = t->from.fd = t->to.fd = -1;
    t->call = call;
    call->transfer = t;
    call->ops = &transfer_ops;
    return t;
}

static void drop_chunks(struct transfer *t)
{
    while (t->head) {
        struct chunk *chunk = t->head;
        t->head = chunk->next;
        map_free(chunk, chunk->size);
    }
    t->tail = NULL;
}

void transfer_free(struct transfer *t)
{
    if (t->held)
        t->call->conn->held_until = 1; /* due: released by the next tick, outside of any handler */
    if (t->freezes)
        vm_thaw();
    source_close(&t->ctl);
    source_close(&t->from);
    source_close(&t->to);
    drop_chunks(t);
    map_free(t->result, t->result_cap);
    t->call->transfer = NULL;
    memset(t, 0, sizeof *t);
}

/* Stop the child. One that receives sees its stream end without a commit and undoes its work. */
static void transfer_stop(struct transfer *t)
{
    if (t->pid > 0 && t->to.fd < 0)
        kill(t->pid, SIGKILL);
    else
        leaver_add(t->pid);
    transfer_free(t);
}

void transfer_fail(struct transfer *t, const struct failure *failure)
{
    struct call *call = t->call;
    transfer_stop(t);
    call_fail_with(call, failure);
}

static bool may_send(const struct transfer *t)
{
    return t->call->credit > 0 && conn_room(t->call->conn);
}

static bool try_finish(struct transfer *t)
{
    struct call *call = t->call;
    if (t->from.fd >= 0 || !(t->have_result || t->forward))
        return false;
    if (t->forward) {
        transfer_free(t);
        reply_nil(call);
        return true;
    }
    struct mp_writer w = reply_begin(call);
    mp_put_raw(&w, t->result, t->result_n);
    leaver_add(t->pid);
    transfer_free(t);
    reply_send(call, &w);
    return true;
}

static void transfer_pump(struct call *call)
{
    struct transfer *t = call->transfer;
    if (!t || try_finish(t))
        return;
    if (!t->connecting)
        source_watch(&t->from, t->collect || may_send(t) ? EPOLLIN : 0);
    if (t->watch)
        source_watch(&t->ctl, t->held || may_send(t) ? EPOLLIN : 0);
}

/* --- from the child or socket to the caller -------------------------------------------------- */

static bool result_room(struct transfer *t, size_t more)
{
    if (t->result_n + more <= t->result_cap)
        return true;
    size_t cap = t->result_cap ? 2 * t->result_cap : READ_CHUNK;
    while (cap < t->result_n + more)
        cap *= 2;
    uint8_t *grown = cap > 2 * MAX_FRAME ? NULL : map_resize(t->result, t->result_cap, cap);
    if (!grown)
        return false;
    t->result = grown;
    t->result_cap = cap;
    return true;
}

static void collect(struct transfer *t)
{
    struct failure failure = { .code = "exhausted",
                               .message = "the result is larger than a frame of 4194304 bytes" };
    if (!result_room(t, READ_CHUNK)) {
        transfer_fail(t, &failure);
        return;
    }
    ssize_t n = read(t->from.fd, t->result + t->result_n, READ_CHUNK);
    if (n > 0)
        t->result_n += (size_t)n;
    else if (n == 0 || (errno != EAGAIN && errno != EINTR))
        source_close(&t->from);
    if (t->result_n > MAX_FRAME - 64)
        transfer_fail(t, &failure);
    else
        try_finish(t);
}

void transfer_from_ready(struct source *source, uint32_t events)
{
    struct transfer *t = owner_of(source, struct transfer, from);
    (void)events;
    if (t->collect) {
        collect(t);
        return;
    }
    if (!may_send(t)) {
        source_watch(source, 0);
        return;
    }
    ssize_t n = read(source->fd, item_room(t->call), MAX_ITEM);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n > 0)
        item_send(t->call, (size_t)n);
    else
        source_close(source);
    transfer_pump(t->call);
}

/* --- from the caller to the child or socket -------------------------------------------------- */

static void input_complete(struct transfer *t)
{
    if (t->forward)
        shutdown(t->to.fd, SHUT_WR);
    else
        send(t->ctl.fd, "E", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    source_close(&t->to);
}

/* Write what the other side takes; the caller may then send as much again. */
static void push(struct transfer *t)
{
    while (t->head) {
        struct chunk *chunk = t->head;
        ssize_t n = write(t->to.fd, chunk->data + chunk->at, chunk->n - chunk->at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN) {
            source_watch(&t->to, EPOLLOUT);
            return;
        }
        if (n < 0) { /* it reads no more; why comes as its result */
            drop_chunks(t);
            source_close(&t->to);
            return;
        }
        chunk->at += (size_t)n;
        if (chunk->at < chunk->n)
            continue;
        t->head = chunk->next;
        if (!t->head)
            t->tail = NULL;
        map_free(chunk, chunk->size);
        call_grant(t->call, 1);
    }
    source_watch(&t->to, 0);
    if (t->ended)
        input_complete(t);
}

void transfer_to_ready(struct source *source, uint32_t events)
{
    struct transfer *t = owner_of(source, struct transfer, to);
    (void)events;
    if (t->connecting && !forward_connected(t))
        return;
    push(t);
    transfer_pump(t->call);
}

static void transfer_item(struct call *call, struct mp_bytes raw)
{
    struct transfer *t = call->transfer;
    struct mp_reader r = mp_reader_of(raw.p, raw.n);
    struct mp_bytes data = mp_get_bytes(&r);
    if (!mp_finished(&r) || data.n > MAX_ITEM || !t || t->ended) {
        conn_doom(call->conn);
        return;
    }
    if (t->to.fd < 0)
        return;
    size_t size = sizeof(struct chunk) + data.n;
    struct chunk *chunk = map_alloc(size);
    if (!chunk) {
        struct failure failure = { .code = "exhausted", .message = "no memory for the stream" };
        transfer_fail(t, &failure);
        return;
    }
    *chunk = (struct chunk){ .size = size, .n = data.n };
    memcpy(chunk->data, data.p, data.n);
    if (t->tail)
        t->tail->next = chunk;
    else
        t->head = chunk;
    t->tail = chunk;
    if (t->head == chunk && !t->connecting)
        push(t);
}

static void transfer_end(struct call *call)
{
    struct transfer *t = call->transfer;
    if (!t || t->ended)
        return;
    t->ended = true;
    if (!t->head && t->to.fd >= 0 && !t->connecting)
        input_complete(t);
}

static void transfer_cancel(struct call *call)
{
    struct transfer *t = call->transfer;
    bool normal = t->watch || t->forward; /* there is no other way to end these */
    transfer_stop(t);
    if (normal)
        reply_nil(call);
    else
        call_fail(call, "timeout", "the call was cancelled");
}

static void transfer_drop(struct call *call)
{
    if (call->transfer)
        transfer_stop(call->transfer);
}

static const struct call_ops transfer_ops = {
    .pump = transfer_pump, .item = transfer_item, .end = transfer_end,
    .cancel = transfer_cancel, .drop = transfer_drop,
};

/* --- file operations ------------------------------------------------------------------------ */

static void unhold(struct transfer *t)
{
    if (!t->held)
        return;
    t->held = false;
    t->call->conn->held_until = 1; /* not here: what waits may cancel this very call */
}

/* The encoded item lies behind the kind byte on `scratch`, where the frame is built as well. */
static void forward_item(struct call *call, size_t n)
{
    memmove(scratch + 64, scratch + 1, n);
    struct mp_writer w = frame_begin();
    mp_put_array(&w, 3);
    mp_put_u64(&w, 3);
    mp_put_u64(&w, call->id);
    memmove(w.p, scratch + 64, n);
    w.p += n;
    call->credit--;
    frame_send(call->conn, &w);
}

/* One message of the child; false when the transfer is gone. */
static bool handle_report(struct transfer *t, size_t n)
{
    struct failure failure;
    switch (scratch[0]) {
    case REPORT_READY:
        unhold(t);
        return true;
    case REPORT_ITEM:
        forward_item(t->call, n - 1);
        return true;
    case REPORT_RESULT:
        if (!t->collect)
            t->result_n = 0;
        if (!t->result_n && result_room(t, n)) {
            memcpy(t->result, scratch + 1, n - 1);
            t->result_n = n - 1;
        }
        t->have_result = true;
        return !try_finish(t);
    case REPORT_BULK:
        t->have_result = true;
        return !try_finish(t);
    default:
        failure_of_report(scratch, n, &failure);
        transfer_fail(t, &failure);
        return false;
    }
}

static bool read_ctl(struct transfer *t)
{
    int passed;
    while (t->ctl.fd >= 0 && (!t->watch || t->held || may_send(t))) {
        ssize_t n = ctl_receive(t->ctl.fd, scratch, &passed);
        if (passed >= 0)
            close(passed);
        if (n < 0)
            return true;
        if (n == 0) {
            source_close(&t->ctl);
            if (t->have_result)
                return true;
            struct failure failure = { .code = "internal",
                                       .message = "the file operation was killed" };
            transfer_fail(t, &failure);
            return false;
        }
        if (!handle_report(t, (size_t)n))
            return false;
    }
    return true;
}

static void ctl_ready(struct source *source, uint32_t events)
{
    struct transfer *t = owner_of(source, struct transfer, ctl);
    (void)events;
    if (read_ctl(t))
        transfer_pump(t->call);
}

static struct transfer *transfer_of(pid_t pid)
{
    for (struct transfer *t = transfers; t < transfers + MAX_TRANSFERS; t++)
        if (t->used && t->pid == pid)
            return t;
    return NULL;
}

bool transfers_reap(pid_t pid)
{
    struct transfer *t = transfer_of(pid);
    if (t)
        t->pid = 0; /* its last words are still in the socket */
    return t != NULL;
}

bool transfers_stopped(pid_t pid)
{
    struct failure failure = {
        .code = "unavailable",
        .message = "the file operation was stopped from inside the sandbox",
    };
    struct transfer *t = transfer_of(pid);
    if (!t)
        return false;
    bool there = read_ctl(t);
    kill(pid, SIGKILL);
    if (there && t->have_result)
        transfer_pump(t->call); /* it was stopped on its way out: nothing is missing */
    else if (there)
        transfer_fail(t, &failure);
    return true;
}

unsigned transfers_on_files(void)
{
    unsigned n = 0;
    for (struct transfer *t = transfers; t < transfers + MAX_TRANSFERS; t++)
        n += t->used && !t->forward;
    return n;
}

static bool plumb(struct transfer *t, struct file_task *task, int ours[3])
{
    int pair[2];
    bool out = task->op == FILE_LIST || task->op == FILE_GLOB || task->op == FILE_READ ||
               task->op == FILE_DOWNLOAD || task->op == FILE_PACK;
    bool in = task->op == FILE_UPLOAD || (task->op == FILE_WRITE && !task->args->data.p);
    t->collect = task->op == FILE_LIST || task->op == FILE_GLOB;
    t->watch = task->op == FILE_WATCH;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
        return false;
    ours[0] = pair[0];
    task->fds.ctl = pair[1];
    if (out && !pipe_make(&ours[1], &task->fds.out, true))
        return false;
    if (in && !pipe_make(&ours[2], &task->fds.in, false))
        return false;
    if (out && !t->collect)
        fcntl(ours[1], F_SETPIPE_SZ, (int)MAX_ITEM); /* fewer, larger items; refused is fine */
    return true;
}

bool transfer_start(struct call *call, enum file_op op, const struct path_args *args)
{
    struct transfer *t = transfer_new(call);
    struct file_task task = { op, args, { -1, -1, -1, -1, -1, -1, false } };
    int ours[3] = { -1, -1, -1 };
    if (!t) {
        call_fail(call, "exhausted", "%d file operations are running", MAX_TRANSFERS);
        return false;
    }
    t->freezes = op == FILE_PACK;
    pid_t pid = plumb(t, &task, ours) ? child_fork(-1) : -errno;
    if (pid == 0)
        file_child(&task);
    int theirs[] = { task.fds.ctl, task.fds.out, task.fds.in };
    for (int i = 0; i < 3; i++)
        if (theirs[i] >= 0)
            close(theirs[i]);
    struct source *sources[] = { &t->ctl, &t->from, &t->to };
    void (*ready[])(struct source *, uint32_t) = { ctl_ready, transfer_from_ready, transfer_to_ready };
    uint32_t events[] = { EPOLLIN, EPOLLIN, 0 };
    for (int i = 0; i < 3; i++)
        if (ours[i] >= 0 && (pid < 0 || !source_open(sources[i], ours[i], events[i], ready[i]))) {
            close(ours[i]);
            sources[i]->fd = -1;
            pid = pid > 0 ? -ENOSPC : pid;
        }
    if (pid < 0) {
        transfer_free(t);
        call_fail(call, "exhausted", "the sandbox cannot start a file operation: %s",
                  strerror(-pid));
        return false;
    }
    t->pid = pid;
    if (t->watch) {
        t->held = true; /* a request after it must find the watch in effect */
        conn_hold(call->conn);
    }
    return true;
}
