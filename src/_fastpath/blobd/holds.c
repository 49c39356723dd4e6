/* Layers that are mounted on the cache files themselves.
 *
 * Nobody sees their reads, so nothing may be taken out of such a file: each layer holds its blobs
 * from before its mount until after its unmount. A hold needs every chunk present; with preaccess.c
 * some may be missing, for reads of the file wait for them. At most half of the bound is held, so that
 * there is room for what is read on demand. The table names blobs by id: one that is registered anew,
 * after a restart too, is held as before (holds_apply).
 */
#include "blobd/holds.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "blobd/cache.h"
#include "blobd/preaccess.h"

#define LAYERS_AT_ONCE 900u

struct hold {
    char layer[ID_SIZE];
    struct hold *next;
    bool watched;
    uint32_t count;
    char blobs[][ID_SIZE];
};

/* Of the control thread alone. */
static struct hold *holds;

void holds_apply(struct blob *blob)
{
    blob->holds = 0;
    for (const struct hold *hold = holds; hold; hold = hold->next)
        for (uint32_t i = 0; i < hold->count; i++)
            if (strcmp(hold->blobs[i], blob->id) == 0) {
                blob->holds++;
                if (hold->watched)
                    preaccess_watch(blob);
            }
}

static uint64_t held_bytes(void)
{
    uint64_t bytes = 0;
    struct blob *blob;

    for (size_t n = 0; (blob = cache_at(n)); n++) {
        bytes += blob->holds ? blob->length : 0; /* changed by this thread alone */
        cache_unref(blob);
    }
    return bytes;
}

/* What a live mount reads is held again after a restart, whatever is there. `watched`: what is
 * missing may be brought when it is read. */
static void take(struct call *call, const char *id, bool watched)
{
    struct blob *blob = cache_find(id);

    if (!blob) {
        if (!state_restoring())
            call_fail(call, "not_found", "no blob %s is registered", id);
        return;
    }
    uint64_t bytes = held_bytes() + (blob->holds ? 0 : blob->length);
    pthread_mutex_lock(&blob->lock);
    bool whole = blob->present == blob->count;
    int error = 0;
    if (!state_restoring() && !whole && !watched)
        call_fail(call, "wrong_state", "%u of %u chunks of blob %s are present", blob->present,
                  blob->count, id);
    else if (!state_restoring() && limits.cache_bytes && bytes > limits.cache_bytes / 2)
        call_fail(call, "exhausted", "mounted layers hold half of the cache's bound already");
    else if (watched && (state_restoring() || !whole) && (error = preaccess_watch(blob)) &&
             !state_restoring())
        call_fail(call, "internal", "cannot watch the blob %s: %s", id, strerror(-error));
    else
        blob->holds++;
    pthread_mutex_unlock(&blob->lock);
    cache_unref(blob);
}

static void give(const char *id)
{
    struct blob *blob = cache_find(id);

    if (!blob)
        return;
    pthread_mutex_lock(&blob->lock);
    if (--blob->holds == 0)
        preaccess_unwatch(blob);
    pthread_mutex_unlock(&blob->lock);
    cache_unref(blob);
}

/* Give back the first `count` blobs and the memory. */
static void drop(struct hold *hold, uint32_t count)
{
    while (count > 0)
        give(hold->blobs[--count]);
    free(hold);
}

static struct hold **find(const char *layer)
{
    struct hold **at = &holds;

    while (*at && strcmp((*at)->layer, layer) != 0)
        at = &(*at)->next;
    return at;
}

static void file_name(const char *layer, char name[ID_SIZE + 8])
{
    snprintf(name, ID_SIZE + 8, "%s.hold", layer);
}

/* The request as a hold that holds nothing yet; NULL with the call failed. */
static struct hold *read_hold(struct call *call)
{
    struct mp_reader value;
    uint32_t count = call_seek(call, "blobs", &value) ? mp_get_array(&value) : 0;

    if (count == 0 || count > HOLD_BLOBS_MAX) {
        call_fail(call, "invalid_argument", "blobs: not a list of 1 to %u ids", HOLD_BLOBS_MAX);
        return NULL;
    }
    struct hold *hold = calloc(1, sizeof *hold + count * sizeof *hold->blobs);
    if (!hold) {
        call_fail(call, "exhausted", "out of memory");
        return NULL;
    }
    hold->count = count;
    call_id(call, "layer", hold->layer);
    for (uint32_t i = 0; i < count && !call->code; i++)
        if (!call_take_id(&value, hold->blobs[i]))
            call_fail(call, "invalid_argument", "blobs: not ids");
    if (call->code) {
        free(hold);
        return NULL;
    }
    return hold;
}

void do_hold(struct call *call, struct mp_bytes frame)
{
    char name[ID_SIZE + 8];
    struct hold *hold = read_hold(call);
    uint32_t taken = 0;
    struct mp_reader value;

    if (!hold)
        return;
    hold->watched = preaccess_enabled() && call_seek(call, "watch", &value) && mp_get_bool(&value);
    while (taken < hold->count && !call->code) {
        take(call, hold->blobs[taken], hold->watched);
        taken += !call->code;
    }
    file_name(hold->layer, name);
    state_save(call, name, frame);
    if (call->code) {
        drop(hold, taken);
        return;
    }
    struct hold **at = find(hold->layer), *before = *at;
    hold->next = before ? before->next : NULL;
    *at = hold;
    if (before)
        drop(before, before->count);
    mp_put_map(&call->out, 0);
}

void do_release(struct call *call, struct mp_bytes frame)
{
    char layer[ID_SIZE], name[ID_SIZE + 8];

    (void)frame;
    if (!call_id(call, "layer", layer))
        return;
    struct hold **at = find(layer), *hold = *at;
    if (hold) {
        file_name(layer, name);
        state_forget(name);
        *at = hold->next;
        drop(hold, hold->count);
    }
    mp_put_map(&call->out, 0);
}

void do_holds(struct call *call, struct mp_bytes frame)
{
    uint64_t from = call_number(call, "from", 0, UINT32_MAX), total = 0;
    struct hold *first = NULL;

    (void)frame;
    for (struct hold *hold = holds; hold; hold = hold->next)
        if (total++ == from)
            first = hold;
    uint64_t count = from >= total ? 0 : total - from;
    count = count < LAYERS_AT_ONCE ? count : LAYERS_AT_ONCE;
    mp_put_map(&call->out, 2);
    mp_put_text(&call->out, "total");
    mp_put_u64(&call->out, total);
    mp_put_text(&call->out, "layers");
    mp_put_array(&call->out, (uint32_t)count);
    for (; count > 0; count--, first = first->next)
        mp_put_text(&call->out, first->layer);
}
