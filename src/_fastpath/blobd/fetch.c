#include "blobd/fetch.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "blobd/bring.h"

#define MILLISECOND 1000000ull
#define PREFETCH_NS (30000 * MILLISECOND)
#define CHEAP 8 /* this part of what comes while the store thinks is not worth another request */

struct prefetch {
    struct blob *blob;
    uint32_t first, end, priority;
    struct prefetch *next;
};

static struct {
    pthread_mutex_t lock;
    pthread_cond_t demand_ready, prefetch_ready;
    struct fetch *demands, **demands_end;
    struct prefetch *prefetches, *prefetches_last;
    uint32_t prefetch_count; /* queued and running */
    uint32_t demand_threads, prefetch_threads;
} queue = { .lock = PTHREAD_MUTEX_INITIALIZER,
            .demand_ready = PTHREAD_COND_INITIALIZER,
            .prefetch_ready = PTHREAD_COND_INITIALIZER,
            .demands_end = &queue.demands };

/* --- which chunks -------------------------------------------------------------------------- */

/* The largest window of at most `bytes`, within the limits; each is twice the one before. */
static uint64_t window_of(uint64_t bytes)
{
    uint64_t window = limits.fetch_min;

    while (2 * window <= bytes && 2 * window <= limits.fetch_max)
        window *= 2;
    return window;
}

static bool missing(struct blob *blob, uint32_t chunk)
{
    return !blob->busy[chunk] && blob_state(blob, chunk) != CHUNK_PRESENT;
}

static void own(struct fetch *fetch)
{
    for (uint32_t i = fetch->first; i < fetch->end; i++) {
        fetch->owned[(i - fetch->first) / 64] |= 1ULL << (i - fetch->first) % 64;
        fetch->blob->busy[i] = 1;
        fetch->blob->wanted[i] = 0;
    }
}

/* Whether a quarter of the chunk's window is there or on its way. */
static bool is_dense(struct blob *blob, uint32_t chunk, uint64_t window)
{
    uint64_t start = chunk_offset(&blob->chunks[chunk]) / window * window, bytes = 0;
    uint32_t first = blob_find(blob, start);

    for (uint32_t i = first; i < blob->count && chunk_offset(&blob->chunks[i]) < start + window; i++)
        if (!missing(blob, i))
            bytes += blob->chunks[i].size;
    return bytes >= window / 4;
}

/* A read that nobody foresaw: what costs little more than the chunk alone, and up to as much as comes
 * in the time of another request where much was read already. */
static uint64_t demand_bytes(struct blob *blob, uint32_t chunk)
{
    uint64_t thought = store_window_bytes();
    uint64_t wanted = window_of(thought / CHEAP), most = window_of(thought);

    if (prefetch_pending() > 0)
        return limits.fetch_min; /* it brings the rest in the right order */
    for (uint64_t window = 2 * wanted; window <= most; window *= 2)
        if (is_dense(blob, chunk, window))
            wanted = window;
    return wanted;
}

/* The run of missing chunks around `chunk` that begin in its window. */
static void grow(struct fetch *fetch, uint32_t chunk, uint64_t window)
{
    struct blob *blob = fetch->blob;
    uint64_t start = chunk_offset(&blob->chunks[chunk]) / window * window;

    fetch->first = chunk;
    fetch->end = chunk + 1;
    while (fetch->first > 0 && fetch->end - fetch->first < FETCH_CHUNKS && missing(blob, fetch->first - 1) &&
           chunk_offset(&blob->chunks[fetch->first - 1]) >= start)
        fetch->first--;
    while (fetch->end < blob->count && fetch->end - fetch->first < FETCH_CHUNKS &&
           missing(blob, fetch->end) &&
           chunk_offset(&blob->chunks[fetch->end]) < start + window)
        fetch->end++;
}

static bool demand(struct blob *blob, uint32_t chunk, uint64_t deadline_ns)
{
    struct fetch *fetch = calloc(1, sizeof *fetch);

    if (!fetch)
        return false;
    fetch->blob = blob_ref(blob);
    fetch->demand = true;
    fetch->deadline_ns = deadline_ns;
    grow(fetch, chunk, demand_bytes(blob, chunk));
    own(fetch);
    pthread_mutex_lock(&queue.lock);
    *queue.demands_end = fetch;
    queue.demands_end = &fetch->next;
    pthread_cond_signal(&queue.demand_ready);
    pthread_mutex_unlock(&queue.lock);
    return true;
}

enum progress job_advance(struct job *job)
{
    enum progress progress = JOB_READY;

    if (job->blob->removed)
        return JOB_FAILED;
    for (uint32_t i = job->first; i <= job->last; i++) {
        if (blob_state(job->blob, i) == CHUNK_PRESENT)
            continue;
        progress = JOB_WAITS;
        if (!job->blob->busy[i] && !demand(job->blob, i, job->deadline_ns))
            return JOB_FAILED;
    }
    return progress;
}

/* --- threads ------------------------------------------------------------------------------- */

static void *serve_demands(void *argument)
{
    struct fetcher *fetcher = argument;

    for (;;) {
        pthread_mutex_lock(&queue.lock);
        while (!queue.demands)
            pthread_cond_wait(&queue.demand_ready, &queue.lock);
        struct fetch *fetch = queue.demands;
        queue.demands = fetch->next;
        if (!queue.demands)
            queue.demands_end = &queue.demands;
        pthread_mutex_unlock(&queue.lock);
        fetch_run(fetcher, fetch);
        cache_unref(fetch->blob);
        free(fetch);
    }
    return NULL;
}

/* Let a run take in what else is wanted nearby; the lock of the blob is held. */
static void join(struct fetch *fetch, uint64_t window)
{
    struct blob *blob = fetch->blob;
    const struct chunk *chunks = blob->chunks;
    uint64_t near = window / CHEAP;

    for (uint32_t i = fetch->end; i < blob->count && i - fetch->first < FETCH_CHUNKS && missing(blob, i); i++) {
        if (chunk_end(&chunks[i]) - chunk_offset(&chunks[fetch->first]) > window ||
            chunk_offset(&chunks[i]) - chunk_end(&chunks[fetch->end - 1]) > near)
            break;
        if (blob->wanted[i])
            fetch->end = i + 1;
    }
    for (uint32_t i = fetch->first; i-- > 0 && fetch->end - i <= FETCH_CHUNKS && missing(blob, i);) {
        if (chunk_end(&chunks[fetch->end - 1]) - chunk_offset(&chunks[i]) > window ||
            chunk_offset(&chunks[fetch->first]) - chunk_end(&chunks[i]) > near)
            break;
        if (blob->wanted[i])
            fetch->first = i;
    }
}

/* The next run of missing chunks of `item` and around it; false: none is left. */
static bool next_run(struct prefetch *item, struct fetch *fetch)
{
    struct blob *blob = item->blob;
    bool found = false;

    pthread_mutex_lock(&blob->lock);
    while (item->first < item->end && !missing(blob, item->first))
        item->first++;
    if (item->first < item->end && !blob->removed) {
        *fetch = (struct fetch){ .blob = blob, .first = item->first, .end = item->first + 1,
                                 .deadline_ns = now_ns() + PREFETCH_NS };
        join(fetch, window_of(store_window_bytes()));
        own(fetch);
        item->first = fetch->end;
        found = true;
    }
    pthread_mutex_unlock(&blob->lock);
    return found;
}

static void *serve_prefetches(void *argument)
{
    struct fetcher *fetcher = argument;
    struct fetch fetch;

    for (;;) {
        pthread_mutex_lock(&queue.lock);
        while (!queue.prefetches)
            pthread_cond_wait(&queue.prefetch_ready, &queue.lock);
        struct prefetch *item = queue.prefetches;
        queue.prefetches = item->next;
        if (!queue.prefetches)
            queue.prefetches_last = NULL;
        pthread_mutex_unlock(&queue.lock);
        while (next_run(item, &fetch)) {
            atomic_fetch_add(&counters.prefetched_chunks, fetch.end - fetch.first);
            fetch_run(fetcher, &fetch);
        }
        cache_unref(item->blob);
        free(item);
        pthread_mutex_lock(&queue.lock);
        queue.prefetch_count--;
        pthread_mutex_unlock(&queue.lock);
    }
    return NULL;
}

int prefetch_add(struct blob *blob, uint32_t first, uint32_t count, uint32_t priority)
{
    struct prefetch *item = malloc(sizeof *item);

    if (!item)
        return -ENOMEM;
    *item = (struct prefetch){ .blob = blob, .first = first, .end = first + count,
                               .priority = priority };
    pthread_mutex_lock(&blob->lock);
    memset(blob->wanted + first, 1, count);
    pthread_mutex_unlock(&blob->lock);
    pthread_mutex_lock(&queue.lock);
    bool full = queue.prefetch_count >= PREFETCHES_MAX;
    if (!full) {
        struct prefetch *last = queue.prefetches_last, **at = &queue.prefetches;
        if (last && last->priority >= priority) /* the usual case */
            at = &last->next;
        while (*at && (*at)->priority >= priority)
            at = &(*at)->next;
        item->next = *at;
        *at = item;
        if (!item->next)
            queue.prefetches_last = item;
        blob_ref(blob);
        queue.prefetch_count++;
        pthread_cond_signal(&queue.prefetch_ready);
    }
    pthread_mutex_unlock(&queue.lock);
    if (full)
        free(item);
    return full ? -EAGAIN : 0;
}

uint32_t prefetch_pending(void)
{
    pthread_mutex_lock(&queue.lock);
    uint32_t count = queue.prefetch_count;
    pthread_mutex_unlock(&queue.lock);
    return count;
}

static bool grow_threads(uint32_t *running, uint32_t wanted, void *(*serve)(void *))
{
    for (pthread_t thread; *running < wanted && *running < THREADS_MAX; (*running)++) {
        struct fetcher *fetcher = fetcher_open();
        if (!fetcher || pthread_create(&thread, NULL, serve, fetcher) != 0)
            return false; /* too few are better than none: the caller decides */
        pthread_detach(thread);
    }
    return true;
}

bool fetch_start(uint32_t demand_threads, uint32_t prefetch_threads)
{
    return grow_threads(&queue.demand_threads, demand_threads, serve_demands) &&
           grow_threads(&queue.prefetch_threads, prefetch_threads, serve_prefetches) && jobs_start();
}
