/* The reads that wait on their blobs, and the clock over them. */
#ifndef DSEC_BLOBD_JOBS_H
#define DSEC_BLOBD_JOBS_H

#include "blobd/fetch.h"

#define FETCH_CHUNKS 2048u /* at most in one fetch */

/* A run of chunks. Those it owns are marked busy for it; an owned chunk is given up by making it
 * present or by failing. */
struct fetch {
    struct blob *blob;
    uint32_t first, end;
    bool demand;
    uint64_t deadline_ns;
    struct fetch *next;
    uint64_t owned[FETCH_CHUNKS / 64];
};

/* Only the thread that runs the fetch asks or changes this. */
static inline bool fetch_owns(const struct fetch *fetch, uint32_t chunk)
{
    uint32_t i = chunk - fetch->first;
    return fetch->owned[i / 64] >> i % 64 & 1;
}

static inline void fetch_disown(struct fetch *fetch, uint32_t chunk)
{
    uint32_t i = chunk - fetch->first;
    fetch->owned[i / 64] &= ~(1ULL << i % 64);
    fetch->blob->busy[chunk] = 0; /* with the lock of the blob held */
}

enum progress { JOB_READY, JOB_WAITS, JOB_FAILED };

/* Demand what the job still misses; the lock of its blob is held. */
enum progress job_advance(struct job *job);

bool jobs_start(void);
/* The blob was removed: nobody looks after its jobs any more. */
void jobs_end(struct blob *blob);
/* Answer the jobs on the fetch's chunks that have all they need, let the others demand what they miss. */
void jobs_wake(const struct fetch *fetch);
/* What the fetch still owns has failed: no longer busy, and jobs on it get EIO, except those with a
 * deadline after `spared_ns`, which try again. */
void jobs_fail(struct fetch *fetch, uint64_t spared_ns);

#endif
