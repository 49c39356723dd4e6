#include "blobd/bring.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "blobd/digest.h"
#include "blobd/log.h"

#define LASTING_TRIES 3 /* for damage and missing objects */
#define PREFETCH_TRIES 3
#define BACKOFF_NS 40000000ull
#define BACKOFF_MAX_NS 2000000000ull
#define STEP_BYTES (2u * CHUNK_MAX) /* of an answer that are kept at once */
#define DISK_FULL_BYTES (4u << 20) /* freed beyond what is needed when the disk is full */

/* What a fetch thread owns. */
struct fetcher {
    uint8_t *data;
    size_t room;
    unsigned seed;
};

/* What has come of one request so far. */
struct arrival {
    struct fetcher *fetcher;
    struct fetch *fetch;
    uint64_t offset;    /* in the blob, of the first byte */
    uint32_t next, end; /* chunks not yet looked at */
    struct fault fault;
};

/* Moving averages, 0: none yet. */
static _Atomic uint64_t latency_ns; /* until the first byte */
static _Atomic uint64_t mib_ns;     /* for each MiB from then on */

uint64_t store_latency_ns(void)
{
    return atomic_load(&latency_ns);
}

uint64_t store_window_bytes(void)
{
    uint64_t each = atomic_load(&mib_ns);
    return each ? (atomic_load(&latency_ns) << 20) / each : 0;
}

static void average(_Atomic uint64_t *value, uint64_t ns)
{
    uint64_t before = atomic_load(value);
    atomic_store(value, before ? before - before / 4 + ns / 4 : ns); /* the first ones are slow */
}

static void note_pace(struct pace pace, size_t size)
{
    average(&latency_ns, pace.first_ns);
    if (pace.rest_ns && size >= CHUNK_MAX)
        average(&mib_ns, (pace.rest_ns << 20) / size);
}

struct fetcher *fetcher_open(void)
{
    struct fetcher *fetcher = calloc(1, sizeof *fetcher);

    if (!fetcher)
        return NULL;
    fetcher->seed = (unsigned)now_ns();
    if (!reader_add()) {
        free(fetcher);
        return NULL;
    }
    return fetcher;
}

static void end_chunk(struct fetch *fetch, uint32_t chunk)
{
    blob_set_present(fetch->blob, chunk);
    fetch_disown(fetch, chunk);
}

/* Chunks that lie in the file without a proof: prove them, which needs no store. */
static void prove_suspects(struct fetcher *fetcher, struct fetch *fetch)
{
    struct blob *blob = fetch->blob;

    for (uint32_t i = fetch->first; i < fetch->end; i++) {
        const struct chunk *chunk = &blob->chunks[i];
        if (blob_state(blob, i) != CHUNK_SUSPECT) /* an owned one is not changed by others */
            continue;
        bool good = pread(blob->data, fetcher->data, chunk->size, (off_t)chunk_offset(chunk)) ==
                        (ssize_t)chunk->size &&
                    sha256_is(fetcher->data, chunk->size, chunk->digest);
        uint64_t size = (uint64_t)chunk_blocks(chunk) * BLOCK, padding = size - chunk->size;
        if (good && padding) { /* not covered by the digest */
            memset(fetcher->data, 0, padding);
            good = pwrite(blob->data, fetcher->data, padding,
                          (off_t)(chunk_offset(chunk) + chunk->size)) == (ssize_t)padding;
        }
        pthread_mutex_lock(&blob->lock);
        if (good)
            end_chunk(fetch, i);
        else
            blob_set_absent(blob, i);
        pthread_mutex_unlock(&blob->lock);
        if (!good)
            cache_unreserve(size);
        atomic_fetch_add(&counters.verified_chunks, good);
    }
}

static bool write_all(int fd, const uint8_t *data, uint64_t offset, size_t size)
{
    for (size_t done = 0; done < size;) {
        ssize_t n = pwrite(fd, data + done, size - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false;
        done += (size_t)n;
    }
    return true;
}

static bool write_run(struct blob *blob, const uint8_t *data, uint64_t offset, size_t size)
{
    for (int tries = 0; tries < 3; tries++) {
        if (write_all(blob->data, data, offset, size))
            return true;
        if ((errno != ENOSPC && errno != EDQUOT) || !cache_shrink(size + DISK_FULL_BYTES))
            break;
    }
    log_line(LOG_ERROR, "cannot write to the cache", blob->id, "%s", strerror(errno));
    return false;
}

/* Store the checked chunks [from, to) that begin at `data`. */
static bool keep_run(struct fetch *fetch, const uint8_t *data, uint32_t from, uint32_t to)
{
    struct blob *blob = fetch->blob;
    uint64_t offset = chunk_offset(&blob->chunks[from]);
    uint64_t size = chunk_end(&blob->chunks[to - 1]) - offset;

    if (!cache_reserve(size)) {
        atomic_fetch_add(&counters.no_room, 1);
        log_line(LOG_ERROR, "the cache is full of what must not be evicted", blob->id, NULL);
        return false;
    }
    if (!write_run(blob, data, offset, size)) {
        cache_unreserve(size);
        return false;
    }
    pthread_mutex_lock(&blob->lock);
    for (uint32_t i = from; i < to; i++)
        end_chunk(fetch, i);
    pthread_mutex_unlock(&blob->lock);
    return true;
}

/* Check the chunks [from, to), which begin at `start`, and keep the good ones. */
static void check_run(struct fetch *fetch, uint8_t *start, uint32_t from, uint32_t to,
                      struct fault *fault)
{
    struct blob *blob = fetch->blob;
    uint64_t offset = chunk_offset(&blob->chunks[from]);
    uint32_t good = from; /* first of the good ones not yet kept */

    for (uint32_t i = from; i <= to; i++) {
        bool ok = false;
        if (i < to) {
            const struct chunk *chunk = &blob->chunks[i];
            uint8_t *data = start + (chunk_offset(chunk) - offset);
            ok = sha256_is(data, chunk->size, chunk->digest);
            memset(data + chunk->size, 0, (size_t)chunk_blocks(chunk) * BLOCK - chunk->size);
            if (!ok) {
                fault->kind = FAULT_LASTING;
                strcpy(fault->text, "the store's bytes are not those of the index");
                atomic_fetch_add(&counters.damaged_chunks, 1);
            }
        }
        if (ok)
            continue;
        if (good < i && !keep_run(fetch, start + (chunk_offset(&blob->chunks[good]) - offset), good, i)) {
            fault->kind = FAULT_LASTING;
            strcpy(fault->text, "no room in the cache");
        }
        good = i + 1;
    }
}

/* Keep the chunks that are complete, some at a time: reads of them go on while the rest comes. */
static void take_arrived(void *argument, size_t filled)
{
    struct arrival *arrival = argument;
    const struct chunk *chunks = arrival->fetch->blob->chunks;
    uint32_t from = arrival->next, to = from;

    while (to < arrival->end && chunk_end(&chunks[to]) - arrival->offset <= filled)
        to++;
    bool last = to == arrival->end;
    if (to == from || (!last && chunk_end(&chunks[to - 1]) - chunk_offset(&chunks[from]) < STEP_BYTES))
        return;
    check_run(arrival->fetch, arrival->fetcher->data + (chunk_offset(&chunks[from]) - arrival->offset),
              from, to, &arrival->fault);
    arrival->next = to;
    if (!last)
        jobs_wake(arrival->fetch);
}

static uint64_t attempt_ns(uint64_t deadline_ns)
{
    uint64_t now = now_ns();
    uint64_t left = deadline_ns > now ? deadline_ns - now : 0, most = limits.attempt_ns;
    return left < most ? left : most;
}

static bool ensure_room(struct fetcher *fetcher, size_t size)
{
    if (size <= fetcher->room)
        return true;
    free(fetcher->data);
    fetcher->data = malloc(size);
    fetcher->room = fetcher->data ? size : 0;
    return fetcher->data != NULL;
}

/* One attempt at every run of chunks that is still missing. */
static void attempt(struct fetcher *fetcher, struct fetch *fetch, const struct source *source,
                    struct fault *fault)
{
    struct blob *blob = fetch->blob;

    for (uint32_t from = fetch->first, to; from < fetch->end; from = to) {
        to = from + 1;
        if (!fetch_owns(fetch, from))
            continue;
        while (to < fetch->end && fetch_owns(fetch, to))
            to++;
        struct arrival arrival = { .fetcher = fetcher, .fetch = fetch, .next = from, .end = to,
                                   .offset = chunk_offset(&blob->chunks[from]) };
        size_t size = (size_t)(chunk_end(&blob->chunks[to - 1]) - arrival.offset);
        struct fault found;
        struct reader *reader = reader_take();
        struct pace pace = source_read(reader, source, arrival.offset, fetcher->data, size,
                                       attempt_ns(fetch->deadline_ns), take_arrived, &arrival, &found);
        reader_give(reader);
        atomic_fetch_add(&counters.fetches, 1);
        if (!found.kind) {
            note_pace(pace, size);
            atomic_fetch_add(&counters.fetched_bytes, size);
            take_arrived(&arrival, size);
            found = arrival.fault;
        }
        if (found.kind > fault->kind)
            *fault = found;
    }
}

static bool is_wanted(struct blob *blob, uint32_t chunk)
{
    for (struct job *job = blob->jobs; job; job = job->next)
        if (job->first <= chunk && chunk <= job->last)
            return true;
    return false;
}

/* Give up chunks that came along with a demand and failed; true when some are still to be had. */
static bool drop_unwanted(struct fetch *fetch)
{
    struct blob *blob = fetch->blob;
    bool left = false;

    pthread_mutex_lock(&blob->lock);
    for (uint32_t i = fetch->first; i < fetch->end; i++) {
        if (!fetch_owns(fetch, i))
            continue;
        if (fetch->demand && !is_wanted(blob, i))
            fetch_disown(fetch, i);
        else
            left = true;
    }
    pthread_mutex_unlock(&blob->lock);
    return left;
}

static void back_off(struct fetcher *fetcher, uint32_t tries, uint64_t deadline_ns)
{
    uint64_t wait = tries > 6 ? BACKOFF_MAX_NS : BACKOFF_NS << (tries - 1), now = now_ns();

    wait = wait / 2 + wait / 2 * (uint64_t)(rand_r(&fetcher->seed) % 1024) / 1024;
    if (now + wait > deadline_ns)
        wait = deadline_ns > now ? deadline_ns - now : 0;
    nanosleep(&(struct timespec){ .tv_sec = (time_t)(wait / 1000000000u),
                                  .tv_nsec = (long)(wait % 1000000000u) },
              NULL);
}

static bool give_up(const struct fetch *fetch, const struct fault *fault, uint32_t tries,
                    uint32_t lasting)
{
    return now_ns() >= fetch->deadline_ns || lasting >= LASTING_TRIES ||
           fault->kind == FAULT_NONE || (!fetch->demand && tries >= PREFETCH_TRIES);
}

/* Try until everything is there or it is time to give up; false with the last fault. */
static bool bring(struct fetcher *fetcher, struct fetch *fetch, const struct source *source,
                  struct fault *fault)
{
    uint32_t lasting = 0;

    for (uint32_t tries = 1;; tries++) {
        *fault = (struct fault){ .kind = FAULT_NONE };
        attempt(fetcher, fetch, source, fault);
        jobs_wake(fetch);
        if (!drop_unwanted(fetch))
            return true;
        atomic_fetch_add(&counters.fetch_faults, 1);
        lasting = fault->kind == FAULT_LASTING ? lasting + 1 : 0;
        if (tries == 1)
            log_line(LOG_WARNING, "a fetch failed", fetch->blob->id, "%s", fault->text);
        if (give_up(fetch, fault, tries, lasting))
            return false;
        back_off(fetcher, tries, fetch->deadline_ns);
    }
}

void fetch_run(struct fetcher *fetcher, struct fetch *fetch)
{
    struct blob *blob = fetch->blob;
    uint64_t size = chunk_end(&blob->chunks[fetch->end - 1]) - chunk_offset(&blob->chunks[fetch->first]);
    struct fault fault = { .kind = FAULT_LASTING, .text = "out of memory" };
    struct source source;

    pthread_mutex_lock(&blob->lock);
    bool good = source_copy(&source, &blob->source);
    pthread_mutex_unlock(&blob->lock);
    if (good && ensure_room(fetcher, size < CHUNK_MAX ? CHUNK_MAX : size)) {
        prove_suspects(fetcher, fetch);
        good = bring(fetcher, fetch, &source, &fault);
    } else {
        good = false;
    }
    source_free(&source);
    if (good)
        return;
    log_line(LOG_ERROR, "chunks cannot be had", blob->id, "%u to %u: %s", fetch->first,
             fetch->end - 1, fault.text);
    /* Reads that joined a prefetch, or came later than the first, have time of their own. */
    jobs_fail(fetch, fetch->demand && fault.kind == FAULT_LASTING ? UINT64_MAX : now_ns());
}
