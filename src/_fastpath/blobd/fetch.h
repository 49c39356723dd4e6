/* Reads that wait, the fetches they wait for, and prefetches.
 *
 * A read whose chunks are present is answered at once by the thread that took it (serve_read). Any
 * other becomes a job on its blob; nobody blocks on it. Fetch threads bring chunks: each takes a run
 * of missing chunks, reads it from the source, checks every chunk, writes the good ones to the cache,
 * marks them and answers the jobs that need nothing more. A chunk is in one fetch at a time (`busy`).
 * A timer answers EIO to a job whose deadline passed, whatever its fetch is doing.
 */
#ifndef DSEC_BLOBD_FETCH_H
#define DSEC_BLOBD_FETCH_H

#include "blobd/cache.h"

#define DEMAND_THREADS 16
#define PREFETCH_THREADS 16
#define THREADS_MAX 64
#define PREFETCHES_MAX 65536u

struct job {
    uint64_t unique; /* of the FUSE request */
    uint64_t offset;
    uint64_t deadline_ns;
    uint32_t size;
    uint32_t first, last; /* chunks */
    uint32_t pid;
    bool interrupted;
    struct blob *blob;
    struct job *next;
};

bool fetch_start(uint32_t demand_threads, uint32_t prefetch_threads);

/* Answer a read, now or later. `size` > 0 bytes at `offset` lie within the blob, whose reference the
 * call takes over. */
void serve_read(struct blob *blob, uint64_t unique, uint64_t offset, uint32_t size, uint32_t pid);
/* A signal came to who waits for `unique`. False: there is no such job. */
bool interrupt_job(uint64_t unique);

/* Queue chunks [first, first + count), higher priorities first. -EAGAIN: the queue is full. */
int prefetch_add(struct blob *blob, uint32_t first, uint32_t count, uint32_t priority);
uint32_t prefetch_pending(void);
uint32_t jobs_waiting(void);
uint64_t store_latency_ns(void);
/* How much the store sends in the time that it takes to answer; 0: not known. */
uint64_t store_window_bytes(void);

#endif
