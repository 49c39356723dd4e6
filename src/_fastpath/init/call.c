#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "conn.h"
#include "job.h"

static struct call *calls;
static unsigned calls_high; /* no slot at or above this was ever used */
uint8_t *scratch;
static bool scratch_big;

bool scratch_open(void)
{
    scratch = table_alloc(SCRATCH_BYTES);
    return scratch != NULL;
}

bool call_table_open(void)
{
    calls = table_alloc(MAX_CALLS * sizeof *calls);
    return calls != NULL;
}

void scratch_used(size_t n)
{
    scratch_big |= n > 8192;
}

/* Give pages of a big frame back; the first few stay, every call needs them. */
void scratch_trim(void)
{
    if (scratch_big)
        madvise(scratch + 8192, SCRATCH_BYTES - 8192, MADV_DONTNEED);
    scratch_big = false;
}

struct call *call_open(struct conn *conn, uint64_t id)
{
    if (conn->open_calls == MAX_CALLS_PER_CONN)
        return NULL;
    unsigned i = 0;
    while (i < calls_high && calls[i].conn)
        i++;
    if (i == MAX_CALLS)
        return NULL;
    if (i == calls_high)
        calls_high++;
    struct call *call = &calls[i];
    *call = (struct call){
        .id = id, .conn = conn, .credit = INITIAL_CREDIT, .owed = INITIAL_CREDIT,
        .next = conn->calls,
    };
    conn->calls = call;
    conn->open_calls++;
    return call;
}

struct call *call_find(struct conn *conn, uint64_t id)
{
    struct call *call = conn->calls;
    while (call && call->id != id)
        call = call->next;
    return call;
}

static void call_close(struct call *call)
{
    struct call **link = &call->conn->calls;
    while (*link != call)
        link = &(*link)->next;
    *link = call->next;
    call->conn->open_calls--;
    job_detach(call);
    stdin_forget(call);
    memset(call, 0, sizeof *call);
}

static void call_drop(struct call *call)
{
    if (call->ops && call->ops->drop)
        call->ops->drop(call);
    call_close(call);
}

void calls_drop(struct conn *conn)
{
    while (conn->calls)
        call_drop(conn->calls);
}

void calls_drop_others(struct call *kept)
{
    struct call *call;
    while ((call = kept->conn->calls != kept ? kept->conn->calls : kept->next))
        call_drop(call);
}

struct mp_writer frame_begin(void)
{
    struct mp_writer w = mp_writer_of(scratch, MAX_FRAME + 4);
    w.p += 4;
    return w;
}

bool frame_send(struct conn *conn, struct mp_writer *w)
{
    if (w->overflow)
        return false;
    size_t n = mp_written(w) - 4;
    for (int i = 0; i < 4; i++)
        w->start[i] = (uint8_t)(n >> (24 - 8 * i));
    scratch_used(n);
    conn_send(conn, w->start, n + 4);
    return true;
}

struct mp_writer reply_begin(struct call *call)
{
    struct mp_writer w = frame_begin();
    mp_put_array(&w, 3);
    mp_put_u64(&w, 1);
    mp_put_u64(&w, call->id);
    return w;
}

void reply_send(struct call *call, struct mp_writer *w)
{
    if (frame_send(call->conn, w))
        call_close(call);
    else
        call_fail(call, "exhausted", "the result is larger than a frame of %u bytes", MAX_FRAME);
}

void reply_nil(struct call *call)
{
    struct mp_writer w = reply_begin(call);
    mp_put_nil(&w);
    reply_send(call, &w);
}

void reply_raw(struct call *call, const void *raw, size_t n)
{
    struct mp_writer w = reply_begin(call);
    mp_put_raw(&w, raw, n);
    reply_send(call, &w);
}

static int utf8_length(const uint8_t *p)
{
    int n = p[0] < 0x80 ? 1 : p[0] >= 0xc2 && p[0] < 0xe0 ? 2
          : p[0] >= 0xe0 && p[0] < 0xf0 ? 3 : p[0] >= 0xf0 && p[0] < 0xf5 ? 4 : 0;
    for (int i = 1; i < n; i++)
        if ((p[i] & 0xc0) != 0x80)
            return 0;
    if (n == 3 && ((p[0] == 0xe0 && p[1] < 0xa0) || (p[0] == 0xed && p[1] > 0x9f)))
        return 0;
    if (n == 4 && ((p[0] == 0xf0 && p[1] < 0x90) || (p[0] == 0xf4 && p[1] > 0x8f)))
        return 0;
    return n;
}

void text_clean(char *text)
{
    uint8_t *p = (uint8_t *)text;
    while (*p) {
        int n = utf8_length(p);
        if (n == 0 || *p < 0x20 || *p == 0x7f) {
            *p++ = '?';
            continue;
        }
        p += n;
    }
}

void call_fail_with(struct call *call, const struct failure *failure)
{
    struct mp_writer w = frame_begin();
    char message[sizeof failure->message];
    memcpy(message, failure->message, sizeof message);
    message[sizeof message - 1] = 0;
    text_clean(message);
    mp_put_array(&w, 3);
    mp_put_u64(&w, 2);
    mp_put_u64(&w, call->id);
    mp_put_map(&w, 3);
    mp_put_text(&w, "code");
    mp_put_text(&w, failure->code);
    mp_put_text(&w, "message");
    mp_put_text(&w, message);
    mp_put_text(&w, "detail");
    mp_put_map(&w, failure->reason ? 1 : 0);
    if (failure->reason) {
        mp_put_text(&w, "reason");
        mp_put_text(&w, failure->reason);
    }
    frame_send(call->conn, &w);
    call_close(call);
}

void call_fail(struct call *call, const char *code, const char *format, ...)
{
    struct failure failure = { .code = code };
    va_list args;
    va_start(args, format);
    vsnprintf(failure.message, sizeof failure.message, format, args);
    va_end(args);
    call_fail_with(call, &failure);
}

void call_grant(struct call *call, uint32_t n)
{
    struct mp_writer w = frame_begin();
    mp_put_array(&w, 3);
    mp_put_u64(&w, 5);
    mp_put_u64(&w, call->id);
    mp_put_u64(&w, n);
    call->owed += n;
    frame_send(call->conn, &w);
}

/* [3, id, bin32]: heads of fixed size, so that the content's place is known before its length. */
#define ITEM_HEAD (4 + 1 + 1 + 9 + 5)

uint8_t *item_room(struct call *call)
{
    (void)call;
    return scratch + ITEM_HEAD;
}

void item_send(struct call *call, size_t n)
{
    struct mp_writer w = frame_begin();
    w.p = w.start + 4;
    mp_put_array(&w, 3);
    mp_put_u64(&w, 3);
    *w.p++ = 0xcf;
    for (int i = 0; i < 8; i++)
        *w.p++ = (uint8_t)(call->id >> (56 - 8 * i));
    *w.p++ = 0xc6;
    for (int i = 0; i < 4; i++)
        *w.p++ = (uint8_t)(n >> (24 - 8 * i));
    w.p += n;
    call->credit--;
    frame_send(call->conn, &w);
}

void item_send_raw(struct call *call, const void *raw, size_t n)
{
    struct mp_writer w = frame_begin();
    mp_put_array(&w, 3);
    mp_put_u64(&w, 3);
    mp_put_u64(&w, call->id);
    mp_put_raw(&w, raw, n);
    call->credit--;
    frame_send(call->conn, &w);
}
