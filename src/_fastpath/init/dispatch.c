/* From a frame to the handler of its operation. */
#include <string.h>

#include "conn.h"
#include "config.h"
#include "exec_calls.h"
#include "fncall.h"
#include "job.h"
#include "root.h"
#include "session.h"
#include "transfer.h"
#include "vm.h"

static void refuse(struct call *call, const char *problem)
{
    call_fail(call, "invalid_argument", "%s", problem);
}

static void op_session_open(struct call *call, struct mp_bytes raw)
{
    struct session_args args;
    const char *problem = args_session(raw, &args);
    if (problem)
        refuse(call, problem);
    else
        session_open(call, &args);
}

static void op_session_close(struct call *call, struct mp_bytes raw)
{
    struct session_args args;
    const char *problem = args_session(raw, &args);
    if (problem)
        refuse(call, problem);
    else
        session_close(call, args.name);
}

static void op_session_list(struct call *call, struct mp_bytes raw)
{
    const char *problem = args_nothing(raw);
    if (problem)
        refuse(call, problem);
    else
        session_list(call);
}

static void op_forward(struct call *call, struct mp_bytes raw)
{
    uint16_t port;
    const char *problem = args_port(raw, &port);
    if (problem)
        refuse(call, problem);
    else
        forward_start(call, port);
}

/* A serial port may lose one peer and get the next unseen, while the machine stands still: the first frame
 * of a peer says so itself. */
static void op_ping(struct call *call, struct mp_bytes raw)
{
    bool first;
    const char *problem = args_ping(raw, &first);
    if (problem) {
        refuse(call, problem);
        return;
    }
    if (first)
        calls_drop_others(call);
    reply_nil(call);
}

/* The sandbox is about to be frozen. The next request, which the thaw brings, sets the clock going. */
static void op_pause(struct call *call, struct mp_bytes raw)
{
    (void)raw;
    clock_stop();
    reply_nil(call);
}

static void op_stats(struct call *call, struct mp_bytes raw)
{
    (void)raw;
    struct mp_writer w = reply_begin(call);
    mp_put_map(&w, 4);
    mp_put_text(&w, "commands");
    mp_put_u64(&w, jobs_running());
    mp_put_text(&w, "spool_bytes");
    mp_put_u64(&w, spool_bytes());
    mp_put_text(&w, "sessions");
    mp_put_u64(&w, sessions_count());
    mp_put_text(&w, "kill"); /* how far a kill reaches: "tree" misses double-forked daemons */
    mp_put_text(&w, config.has_cgroup ? "cgroup" : "tree");
    reply_send(call, &w);
}

#define PATH_FIELDS "path user follow recursive mode"

static const struct file_entry {
    const char *name;
    enum file_op op;
    const char *fields;
} file_entries[] = {
    { "stat", FILE_STAT, PATH_FIELDS },
    { "list", FILE_LIST, PATH_FIELDS },
    { "glob", FILE_GLOB, PATH_FIELDS },
    { "mkdir", FILE_MKDIR, PATH_FIELDS },
    { "remove", FILE_REMOVE, PATH_FIELDS },
    { "watch", FILE_WATCH, PATH_FIELDS },
    { "rename", FILE_RENAME, "path target user" },
    { "chmod", FILE_CHMOD, "path user mode owner recursive" },
    { "chown", FILE_CHOWN, "path user mode owner recursive" },
    { "read", FILE_READ, "path user offset length" },
    { "write", FILE_WRITE, "path user data append mode" },
    { "download", FILE_DOWNLOAD, "path user" },
    { "upload", FILE_UPLOAD, "path user" },
};

static const char *missing_field(const struct file_entry *entry, const struct path_args *args)
{
    if (entry->op == FILE_RENAME && !args->target.n)
        return "field \"target\" is missing";
    if (entry->op == FILE_CHMOD && !args->mode.set)
        return "field \"mode\" is missing";
    if (entry->op == FILE_CHOWN && !args->owner.n)
        return "field \"owner\" is missing";
    return NULL;
}

static void file_call(struct call *call, const struct file_entry *entry, struct mp_bytes raw)
{
    struct path_args args;
    const char *problem = args_path(raw, entry->fields, &args);
    if (!problem)
        problem = missing_field(entry, &args);
    if (problem)
        refuse(call, problem);
    else
        transfer_start(call, entry->op, &args);
}

static const struct operation {
    const char *name;
    void (*handle)(struct call *, struct mp_bytes args);
} operations[] = {
    { "exec.run", exec_run },         { "exec.start", exec_start },
    { "exec.attach", exec_attach },   { "exec.wait", exec_wait },
    { "exec.stdin", exec_stdin },     { "exec.signal", exec_signal },
    { "exec.kill", exec_kill },       { "exec.resize", exec_resize },
    { "exec.list", exec_list },       { "exec.forget", exec_forget },
    { "session.open", op_session_open },
    { "session.close", op_session_close },
    { "session.list", op_session_list },
    { "net.forward", op_forward },    { "root.swap", root_swap },
    { "fncall.serve", fncall_serve },
    { "sys.ping", op_ping },          { "sys.stats", op_stats },
    { "sys.pause", op_pause },
    { "vm.begin", vm_begin },         { "vm.clock", vm_clock },
    { "vm.renew", vm_renew },
    { "vm.watch", vm_watch },         { "vm.pack", vm_pack },
};

static void handle_request(struct call *call, struct mp_bytes op, struct mp_bytes args)
{
    if (!vm_admits(call, op))
        return;
    for (size_t i = 0; i < sizeof operations / sizeof *operations; i++)
        if (mp_equal(op, operations[i].name)) {
            operations[i].handle(call, args);
            return;
        }
    if (op.n > 6 && memcmp(op.p, "files.", 6) == 0) {
        struct mp_bytes rest = { op.p + 6, op.n - 6 };
        for (size_t i = 0; i < sizeof file_entries / sizeof *file_entries; i++)
            if (mp_equal(rest, file_entries[i].name)) {
                file_call(call, &file_entries[i], args);
                return;
            }
    }
    call_fail(call, "unsupported", "no such operation: %.*s", op.n > 64 ? 64 : (int)op.n, op.p);
}

static bool on_request(struct conn *conn, struct mp_reader *r, uint64_t id, uint32_t parts)
{
    struct mp_bytes args;
    struct mp_bytes op = mp_get_str(r);
    mp_raw(r, &args);
    if (parts == 5)
        mp_get_str(r); /* the target was for dsecd */
    if (!mp_finished(r) || call_find(conn, id))
        return false;
    clock_go();
    struct call *call = call_open(conn, id);
    if (call) {
        handle_request(call, op, args);
        return true;
    }
    /* No slot: answer from one that lives on the stack for this frame only. */
    struct mp_writer w = frame_begin();
    mp_put_array(&w, 3);
    mp_put_u64(&w, 2);
    mp_put_u64(&w, id);
    mp_put_map(&w, 2);
    mp_put_text(&w, "code");
    mp_put_text(&w, "exhausted");
    mp_put_text(&w, "message");
    mp_put_text(&w, "too many calls are open on this connection");
    frame_send(conn, &w);
    return true;
}

static bool on_item(struct call *call, struct mp_bytes data)
{
    if (!call || !call->ops || !call->ops->item)
        return true; /* it was answered while the item was on its way */
    if (call->owed == 0)
        return false;
    call->owed--;
    call->ops->item(call, data);
    return true;
}

static void on_credit(struct call *call, uint64_t n)
{
    if (!call)
        return;
    uint64_t sum = call->credit + n;
    call->credit = sum > 1u << 20 ? 1u << 20 : (uint32_t)sum;
    if (call->ops && call->ops->pump)
        call->ops->pump(call);
}

bool dispatch(struct conn *conn, struct mp_bytes body)
{
    struct mp_reader r = mp_reader_of(body.p, body.n);
    uint32_t parts = mp_get_array(&r);
    uint64_t kind = mp_get_u64(&r), id = mp_get_u64(&r);
    if (r.failed || parts < 2)
        return false;
    if (kind == 0)
        return (parts == 4 || parts == 5) && on_request(conn, &r, id, parts);
    struct call *call = call_find(conn, id);
    struct mp_bytes data = { 0 };
    uint64_t n = 0;
    if (kind == 3 && parts == 3)
        mp_raw(&r, &data);
    else if (kind == 5 && parts == 3)
        n = mp_get_u64(&r);
    else if ((kind != 4 && kind != 6) || parts != 2)
        return false;
    if (!mp_finished(&r) || n > UINT32_MAX)
        return false;
    if (kind == 3)
        return on_item(call, data);
    if (kind == 5)
        on_credit(call, n);
    else if (call && call->ops && kind == 4 && call->ops->cancel)
        call->ops->cancel(call);
    else if (call && call->ops && kind == 6 && call->ops->end)
        call->ops->end(call);
    return true;
}
