#include "blobd/trace.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "blobd/cache.h"

struct trace {
    uint64_t number;
    uint32_t count;
    struct blob **blobs;
    uint8_t **seen; /* a bit per chunk, by blob */
    struct step *steps;
    uint32_t step_count, step_room;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct trace *traces[TRACES_MAX];

static struct trace **find(uint64_t number)
{
    for (uint32_t i = 0; i < TRACES_MAX; i++)
        if (traces[i] && traces[i]->number == number)
            return &traces[i];
    return NULL;
}

static void set_traced(struct blob *blob)
{
    bool traced = false;

    for (uint32_t i = 0; i < TRACES_MAX; i++)
        for (uint32_t j = 0; traces[i] && j < traces[i]->count; j++)
            traced = traced || traces[i]->blobs[j] == blob;
    atomic_store(&blob->traced, traced);
}

static void drop(struct trace *trace)
{
    for (uint32_t i = 0; i < trace->count; i++) {
        free(trace->seen ? trace->seen[i] : NULL);
        cache_unref(trace->blobs[i]);
    }
    free(trace->blobs);
    free(trace->seen);
    free(trace->steps);
    free(trace);
}

static struct trace *make(uint64_t number, struct blob **blobs, uint32_t count)
{
    struct trace *trace = calloc(1, sizeof *trace);
    struct blob **copy = calloc(count, sizeof *copy);

    if (!trace || !copy) {
        for (uint32_t i = 0; i < count; i++)
            cache_unref(blobs[i]);
        free(trace);
        free(copy);
        return NULL;
    }
    memcpy(copy, blobs, count * sizeof *copy);
    *trace = (struct trace){ .number = number, .count = count, .blobs = copy,
                             .seen = calloc(count, sizeof *trace->seen) };
    bool complete = trace->seen != NULL;
    for (uint32_t i = 0; i < count && complete; i++) {
        trace->seen[i] = calloc(blobs[i]->count / 8 + 1, 1);
        complete = trace->seen[i] != NULL;
    }
    if (complete)
        return trace;
    drop(trace);
    return NULL;
}

int trace_start(uint64_t number, struct blob **blobs, uint32_t count)
{
    struct trace *trace = make(number, blobs, count);
    uint32_t free_at = 0;
    int error = trace ? 0 : -ENOMEM;

    pthread_mutex_lock(&lock);
    while (free_at < TRACES_MAX && traces[free_at])
        free_at++;
    if (!error && find(number))
        error = -EEXIST;
    else if (!error && free_at == TRACES_MAX)
        error = -EAGAIN;
    if (!error) {
        traces[free_at] = trace;
        for (uint32_t i = 0; i < count; i++)
            atomic_store(&blobs[i]->traced, true);
    }
    pthread_mutex_unlock(&lock);
    if (error && trace)
        drop(trace);
    return error;
}

int trace_stop(uint64_t number)
{
    pthread_mutex_lock(&lock);
    struct trace **at = find(number), *trace = at ? *at : NULL;
    if (at)
        *at = NULL;
    for (uint32_t i = 0; trace && i < trace->count; i++)
        set_traced(trace->blobs[i]);
    pthread_mutex_unlock(&lock);
    if (trace)
        drop(trace);
    return trace ? 0 : -ENOENT;
}

int trace_read(uint64_t number, uint32_t from, struct step *steps, uint32_t room, uint32_t *copied,
               uint32_t *total)
{
    pthread_mutex_lock(&lock);
    struct trace **at = find(number);
    *copied = 0;
    *total = at ? (*at)->step_count : 0;
    if (at && from < *total) {
        *copied = *total - from < room ? *total - from : room;
        memcpy(steps, (*at)->steps + from, *copied * sizeof *steps);
    }
    pthread_mutex_unlock(&lock);
    return at ? 0 : -ENOENT;
}

static void append(struct trace *trace, uint32_t blob, uint32_t chunk)
{
    struct step *last = trace->step_count ? &trace->steps[trace->step_count - 1] : NULL;

    if (last && last->blob == blob && last->first + last->count == chunk) {
        last->count++;
        return;
    }
    if (trace->step_count == trace->step_room) {
        uint32_t room = trace->step_room ? 2 * trace->step_room : 256;
        struct step *more =
            room > TRACE_STEPS_MAX ? NULL : realloc(trace->steps, room * sizeof *more);
        if (!more)
            return; /* the trace ends here; what it has is still of use */
        trace->steps = more;
        trace->step_room = room;
    }
    trace->steps[trace->step_count++] = (struct step){ .blob = blob, .first = chunk, .count = 1 };
}

void trace_note(struct blob *blob, uint32_t first, uint32_t last)
{
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < TRACES_MAX; i++) {
        struct trace *trace = traces[i];
        for (uint32_t j = 0; trace && j < trace->count; j++) {
            for (uint32_t c = first; trace->blobs[j] == blob && c <= last; c++) {
                if (trace->seen[j][c / 8] >> c % 8 & 1)
                    continue;
                trace->seen[j][c / 8] |= (uint8_t)(1u << c % 8);
                append(trace, j, c);
            }
        }
    }
    pthread_mutex_unlock(&lock);
}
