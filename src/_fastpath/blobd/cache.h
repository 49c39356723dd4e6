/* The registered blobs, and the bound on the bytes below blobs/.
 *
 * Bytes count whole: chunks of registered blobs, and files of blobs that nobody has registered (any
 * more), which go first when room is needed. Then a clock goes over the groups of all blobs: a group
 * that was read since the hand passed is spared once; a pinned or held blob, a group being read and
 * chunks being fetched are never touched.
 */
#ifndef DSEC_BLOBD_CACHE_H
#define DSEC_BLOBD_CACHE_H

#include "blobd/blob.h"

struct limits {
    _Atomic uint64_t cache_bytes; /* 0: no bound */
    _Atomic uint64_t demand_ns;   /* a read fails after it */
    _Atomic uint64_t attempt_ns;  /* one request to the store */
    _Atomic uint64_t fetch_min, fetch_max; /* bytes asked for at once */
};

struct counters {
    _Atomic uint64_t reads, hits, waits, read_errors, deadline_errors, interrupted;
    _Atomic uint64_t fetches, fetched_bytes, fetch_faults, damaged_chunks, verified_chunks;
    _Atomic uint64_t prefetched_chunks, evicted_bytes, no_room;
};

extern struct limits limits; /* written by the control thread */
extern struct counters counters;

/* Open the directory and count what lies in it. 0 or negative errno. */
int cache_open(const char *path);
int cache_directory(void);
uint64_t cache_used(void);

/* The registry. A blob found or added is referenced for the caller. */
struct blob *cache_find(const char *id);
struct blob *cache_find_node(uint64_t nodeid);
int cache_add(const char *id, struct source *source, struct blob **added, const char **why);
int cache_remove(const char *id); /* -ENOENT, -EBUSY when pinned or held */
void cache_unref(struct blob *blob);
size_t cache_count(void);
/* Blob number `n` in no particular order, NULL beyond the last. */
struct blob *cache_at(size_t n);

/* Make room for `bytes` and count them as used; false when the bound does not allow it. */
bool cache_reserve(uint64_t bytes);
void cache_unreserve(uint64_t bytes);
/* The disk is full: free at least `bytes`, whatever the bound says. False: there is nothing left. */
bool cache_shrink(uint64_t bytes);

#endif
