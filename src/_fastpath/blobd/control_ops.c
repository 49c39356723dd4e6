/* The operations of the control socket. Arguments are a map; unknown keys are ignored, so that a
 * newer daemon can talk to an older process.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "blobd/holds.h"
#include "blobd/jobs.h"
#include "blobd/preaccess.h"
#include "blobd/trace.h"

#define FETCH_BYTES_MAX (8u << 20)
#define STEPS_AT_ONCE 3000u
#define IDS_AT_ONCE 900u

void call_fail(struct call *call, const char *code, const char *format, ...)
{
    va_list arguments;

    if (call->code)
        return; /* the first one counts */
    call->code = code;
    va_start(arguments, format);
    vsnprintf(call->message, sizeof call->message, format, arguments);
    va_end(arguments);
}

static void fail_errno(struct call *call, int error, const char *what)
{
    const char *code = error == -ENOENT   ? "not_found"
                       : error == -EBUSY  ? "wrong_state"
                       : error == -EEXIST ? "already_exists"
                       : error == -EBADMSG ? "invalid_argument"
                       : error == -EAGAIN || error == -ENOSPC || error == -ENOMEM ? "exhausted"
                                                                                  : "internal";
    call_fail(call, code, "%s: %s", what, strerror(-error));
}

/* --- arguments ----------------------------------------------------------------------------- */

/* Go to the value of `key`; false when it is not there. */
bool call_seek(struct call *call, const char *key, struct mp_reader *value)
{
    *value = call->args;
    for (uint32_t count = mp_get_map(value); count && !value->failed; count--) {
        if (mp_equal(mp_get_str(value), key))
            return true;
        mp_skip(value);
    }
    return false;
}

uint64_t call_number(struct call *call, const char *key, uint64_t otherwise, uint64_t most)
{
    struct mp_reader value;

    if (!call_seek(call, key, &value))
        return otherwise;
    uint64_t number = mp_get_u64(&value);
    if (value.failed || number > most)
        call_fail(call, "invalid_argument", "%s: not a number up to %llu", key,
                  (unsigned long long)most);
    return value.failed ? otherwise : number;
}

bool call_take_id(struct mp_reader *value, char id[ID_SIZE])
{
    struct mp_bytes text = mp_get_str(value);

    if (value->failed || !blob_id_valid((const char *)text.p, text.n))
        return false;
    memcpy(id, text.p, text.n);
    id[text.n] = 0;
    return true;
}

bool call_id(struct call *call, const char *key, char id[ID_SIZE])
{
    struct mp_reader value;

    if (call_seek(call, key, &value) && call_take_id(&value, id))
        return true;
    call_fail(call, "invalid_argument", "%s: not 64 hexadecimal digits", key);
    return false;
}

static struct blob *get_blob(struct call *call)
{
    char id[ID_SIZE];
    struct blob *blob = call_id(call, "id", id) ? cache_find(id) : NULL;

    if (!blob && !call->code)
        call_fail(call, "not_found", "no blob %s is registered", id);
    return blob;
}

/* The blobs of "blobs", each referenced; 0 after a failure. */
static uint32_t get_blobs(struct call *call, struct blob **blobs)
{
    struct mp_reader value;
    char id[ID_SIZE];
    uint32_t wanted = call_seek(call, "blobs", &value) ? mp_get_array(&value) : 0, count = 0;

    if (wanted == 0 || wanted > TRACE_BLOBS_MAX)
        call_fail(call, "invalid_argument", "blobs: not a list of 1 to %u ids", TRACE_BLOBS_MAX);
    while (!call->code && count < wanted) {
        if (!call_take_id(&value, id))
            call_fail(call, "invalid_argument", "blobs: not ids");
        else if (!(blobs[count] = cache_find(id)))
            call_fail(call, "not_found", "no blob %s is registered", id);
        else
            count++;
    }
    while (call->code && count > 0)
        cache_unref(blobs[--count]);
    return count;
}

/* --- operations ---------------------------------------------------------------------------- */

static void put(struct call *call, const char *key, uint64_t value)
{
    mp_put_text(&call->out, key);
    mp_put_u64(&call->out, value);
}

static void do_hello(struct call *call, struct mp_bytes frame)
{
    static const char *const capabilities[] = { "take_over", "splice", "http",      "sigv4",
                                                "interrupt", "hold",   "pre_access" };
    uint32_t count = sizeof capabilities / sizeof *capabilities - !preaccess_enabled();
    uint64_t version = call_number(call, "version", 0, UINT32_MAX);

    (void)frame;
    if (version != CONTROL_VERSION)
        call_fail(call, "unsupported", "this dsec-blobd speaks version %d", CONTROL_VERSION);
    mp_put_map(&call->out, 6);
    put(call, "version", CONTROL_VERSION);
    put(call, "pid", (uint64_t)getpid());
    put(call, "keeper", (uint64_t)(getppid() == service.keeper ? service.keeper : 0));
    put(call, "blobs", cache_count());
    mp_put_text(&call->out, "resend");
    mp_put_bool(&call->out, service.resend);
    mp_put_text(&call->out, "capabilities");
    mp_put_array(&call->out, count);
    for (uint32_t i = 0; i < count; i++)
        mp_put_text(&call->out, capabilities[i]);
}

static void do_configure(struct call *call, struct mp_bytes frame)
{
    uint64_t cache = call_number(call, "cache_bytes", limits.cache_bytes, INT64_MAX);
    uint64_t demand = call_number(call, "demand_ms", limits.demand_ns / 1000000, 86400000);
    uint64_t attempt = call_number(call, "attempt_ms", limits.attempt_ns / 1000000, 86400000);
    uint64_t least = call_number(call, "fetch_min", limits.fetch_min, FETCH_BYTES_MAX);
    uint64_t most = call_number(call, "fetch_max", limits.fetch_max, FETCH_BYTES_MAX);
    uint64_t demands = call_number(call, "demand_threads", DEMAND_THREADS, THREADS_MAX);
    uint64_t prefetches = call_number(call, "prefetch_threads", PREFETCH_THREADS, THREADS_MAX);

    if (!demand || !attempt || !demands || !prefetches || least < CHUNK_MAX || most < least)
        call_fail(call, "invalid_argument",
                  "times and threads must not be 0, fetches not below %u bytes", CHUNK_MAX);
    if (!call->code && !fetch_start((uint32_t)demands, (uint32_t)prefetches))
        call_fail(call, "exhausted", "cannot start the fetch threads");
    state_save(call, "configure", frame);
    if (call->code)
        return;
    limits.cache_bytes = cache;
    limits.demand_ns = demand * 1000000;
    limits.attempt_ns = attempt * 1000000;
    limits.fetch_min = least;
    limits.fetch_max = most;
    mp_put_map(&call->out, 0);
}

static void put_stat(struct call *call, struct blob *blob)
{
    pthread_mutex_lock(&blob->lock);
    uint32_t present = blob->present;
    uint64_t bytes = blob->bytes;
    bool pinned = blob->pinned || blob->holds;
    pthread_mutex_unlock(&blob->lock);
    mp_put_map(&call->out, 6);
    put(call, "length", blob->length);
    put(call, "chunks", blob->count);
    put(call, "present", present);
    put(call, "bytes", bytes);
    mp_put_text(&call->out, "pinned");
    mp_put_bool(&call->out, pinned);
    mp_put_text(&call->out, "whole");
    mp_put_bool(&call->out, present == blob->count);
}

static void do_add(struct call *call, struct mp_bytes frame)
{
    char id[ID_SIZE];
    struct mp_reader value;
    struct source source = { .kind = SOURCE_NONE };
    struct blob *blob = NULL;
    const char *why = "";

    if (!call_id(call, "id", id))
        return;
    if (!call_seek(call, "source", &value) || !source_read_description(&value, &source)) {
        call_fail(call, "invalid_argument", "source: neither a file with a path nor http with a url");
        return;
    }
    blob = cache_find(id);
    int error = 0;
    if (blob)
        blob_swap_source(blob, &source);
    else
        error = cache_add(id, &source, &blob, &why);
    source_free(&source);
    if (error) {
        fail_errno(call, error, why);
        return;
    }
    state_save(call, id, frame);
    put_stat(call, blob);
    cache_unref(blob);
}

static void do_remove(struct call *call, struct mp_bytes frame)
{
    char id[ID_SIZE];

    (void)frame;
    if (!call_id(call, "id", id))
        return;
    struct blob *blob = cache_find(id);
    int error = cache_remove(id);
    if (error) {
        fail_errno(call, error, error == -EBUSY ? "the blob is pinned or held" : "the blob");
    } else {
        state_forget(id);
        jobs_end(blob);
    }
    if (blob)
        cache_unref(blob);
    mp_put_map(&call->out, 0);
}

static void set_pinned(struct call *call, bool pinned, struct mp_bytes frame)
{
    struct blob *blob = get_blob(call);
    char name[ID_SIZE + 8];

    if (!blob)
        return;
    snprintf(name, sizeof name, "%s.pin", blob->id);
    if (pinned)
        state_save(call, name, frame);
    else
        state_forget(name);
    if (!call->code) {
        pthread_mutex_lock(&blob->lock);
        blob->pinned = pinned;
        pthread_mutex_unlock(&blob->lock);
        put_stat(call, blob);
    }
    cache_unref(blob);
}

static void do_pin(struct call *call, struct mp_bytes frame)
{
    set_pinned(call, true, frame);
}

static void do_unpin(struct call *call, struct mp_bytes frame)
{
    set_pinned(call, false, frame);
}

static void do_stat(struct call *call, struct mp_bytes frame)
{
    struct blob *blob = get_blob(call);

    (void)frame;
    if (!blob)
        return;
    put_stat(call, blob);
    cache_unref(blob);
}

static void do_list(struct call *call, struct mp_bytes frame)
{
    size_t from = call_number(call, "from", 0, SIZE_MAX), total = cache_count();
    size_t count = from >= total ? 0 : total - from < IDS_AT_ONCE ? total - from : IDS_AT_ONCE;

    (void)frame; /* this thread alone changes the registry */
    mp_put_map(&call->out, 2);
    put(call, "total", total);
    mp_put_text(&call->out, "ids");
    mp_put_array(&call->out, (uint32_t)count);
    for (size_t i = from; i < from + count; i++) {
        struct blob *blob = cache_at(i);
        mp_put_text(&call->out, blob->id);
        cache_unref(blob);
    }
}

static void do_stats(struct call *call, struct mp_bytes frame)
{
    const struct {
        const char *name;
        uint64_t value;
    } rows[] = {
        { "blobs", cache_count() },
        { "used_bytes", cache_used() },
        { "limit_bytes", limits.cache_bytes },
        { "reads", counters.reads },
        { "hits", counters.hits },
        { "waits", counters.waits },
        { "waiting", jobs_waiting() },
        { "read_errors", counters.read_errors },
        { "deadline_errors", counters.deadline_errors },
        { "interrupted", counters.interrupted },
        { "fetches", counters.fetches },
        { "fetched_bytes", counters.fetched_bytes },
        { "fetch_faults", counters.fetch_faults },
        { "damaged_chunks", counters.damaged_chunks },
        { "verified_chunks", counters.verified_chunks },
        { "prefetched_chunks", counters.prefetched_chunks },
        { "prefetch_pending", prefetch_pending() },
        { "evicted_bytes", counters.evicted_bytes },
        { "no_room", counters.no_room },
        { "latency_us", store_latency_ns() / 1000 },
    };

    (void)frame;
    mp_put_map(&call->out, sizeof rows / sizeof *rows);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        put(call, rows[i].name, rows[i].value);
}

static void do_prefetch(struct call *call, struct mp_bytes frame)
{
    struct blob *blobs[TRACE_BLOBS_MAX];
    struct mp_reader value;
    uint32_t priority = (uint32_t)call_number(call, "priority", 0, UINT32_MAX), queued = 0;
    uint32_t known = call->code ? 0 : get_blobs(call, blobs);

    (void)frame;
    uint32_t count = call_seek(call, "ranges", &value) ? mp_get_array(&value) : 0;
    for (uint32_t i = 0; known && i < count && !call->code; i++) {
        uint32_t parts = mp_get_array(&value);
        uint64_t at = mp_get_u64(&value), first = mp_get_u64(&value), chunks = mp_get_u64(&value);
        if (value.failed || parts != 3 || at >= known || !chunks || first >= blobs[at]->count ||
            chunks > blobs[at]->count - first)
            call_fail(call, "invalid_argument", "ranges: number %u is not within its blob", i);
        else if (prefetch_add(blobs[at], (uint32_t)first, (uint32_t)chunks, priority) == 0)
            queued++;
        else
            break; /* the queue is full: the rest is fetched when it is read */
    }
    for (uint32_t i = 0; i < known; i++)
        cache_unref(blobs[i]);
    mp_put_map(&call->out, 1);
    put(call, "queued", queued);
}

static void do_trace_start(struct call *call, struct mp_bytes frame)
{
    struct blob *blobs[TRACE_BLOBS_MAX];
    uint64_t number = call_number(call, "trace", 0, UINT64_MAX);
    uint32_t count = call->code ? 0 : get_blobs(call, blobs);
    int error = count ? trace_start(number, blobs, count) : 0;

    (void)frame;
    if (error)
        fail_errno(call, error, "trace");
    mp_put_map(&call->out, 0);
}

static void do_trace_read(struct call *call, struct mp_bytes frame)
{
    static struct step steps[STEPS_AT_ONCE];
    uint64_t number = call_number(call, "trace", 0, UINT64_MAX);
    uint32_t from = (uint32_t)call_number(call, "from", 0, UINT32_MAX), copied, total;
    int error = trace_read(number, from, steps, STEPS_AT_ONCE, &copied, &total);

    (void)frame;
    if (error)
        fail_errno(call, error, "trace");
    mp_put_map(&call->out, 2);
    put(call, "total", total);
    mp_put_text(&call->out, "ranges");
    mp_put_array(&call->out, copied);
    for (uint32_t i = 0; i < copied; i++) {
        mp_put_array(&call->out, 3);
        mp_put_u64(&call->out, steps[i].blob);
        mp_put_u64(&call->out, steps[i].first);
        mp_put_u64(&call->out, steps[i].count);
    }
}

static void do_trace_stop(struct call *call, struct mp_bytes frame)
{
    int error = trace_stop(call_number(call, "trace", 0, UINT64_MAX));

    (void)frame;
    if (error)
        fail_errno(call, error, "trace");
    mp_put_map(&call->out, 0);
}

static void do_descriptor(struct call *call, struct mp_bytes frame)
{
    (void)frame;
    uint64_t which = call_number(call, "which", 0, 2);
    call->fd = which == 0 ? service.fuse : which == 1 ? service.group : service.slots;
    mp_put_map(&call->out, 0);
}

static void do_shutdown(struct call *call, struct mp_bytes frame)
{
    (void)frame;
    call->end = true;
    mp_put_map(&call->out, 0);
}

static const struct {
    const char *name;
    void (*run)(struct call *call, struct mp_bytes frame);
} operations[] = {
    { "hello", do_hello },
    { "configure", do_configure },
    { "add", do_add },
    { "remove", do_remove },
    { "pin", do_pin },
    { "unpin", do_unpin },
    { "hold", do_hold },
    { "release", do_release },
    { "holds", do_holds },
    { "stat", do_stat },
    { "list", do_list },
    { "stats", do_stats },
    { "prefetch", do_prefetch },
    { "trace_start", do_trace_start },
    { "trace_read", do_trace_read },
    { "trace_stop", do_trace_stop },
    { "descriptor", do_descriptor },
    { "shutdown", do_shutdown },
};

void call_run(struct call *call, struct mp_bytes operation, struct mp_bytes frame)
{
    struct mp_reader args = call->args;

    mp_get_map(&args);
    if (args.failed) {
        call_fail(call, "invalid_argument", "the arguments are not a map");
        return;
    }
    for (size_t i = 0; i < sizeof operations / sizeof *operations; i++) {
        if (mp_equal(operation, operations[i].name)) {
            operations[i].run(call, frame);
            return;
        }
    }
    call_fail(call, "invalid_argument", "no such operation");
}
