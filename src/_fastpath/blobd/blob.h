/* A blob: its chunk index, its sparse cache file, and the map that says which chunks are there.
 *
 * Files below the cache directory: indexes/<id> (read only, the id is its SHA-256), blobs/<id>
 * (sparse, of the blob's length), maps/<id>: a header of one block, then one byte per chunk. The
 * bytes that stand for a state differ in four bits, so that a flipped bit is not a state.
 *
 * Only a chunk whose digest was checked since the machine started is PRESENT. What lies in the file
 * without such a proof (the machine crashed, the map was damaged) is SUSPECT until it is checked.
 *
 * Who reads a chunk first counts itself in `readers` of the chunk's group, then looks at the state;
 * who evicts first takes the state away, then looks at the count. Both orders are sequentially
 * consistent, so one of them sees the other.
 */
#ifndef DSEC_BLOBD_BLOB_H
#define DSEC_BLOBD_BLOB_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "blobd/source.h"

#define BLOCK 4096u
#define CHUNK_MAX 65536u
#define CHUNKS_MAX (4u << 20) /* of one blob: 256 GiB */
#define GROUP_BLOCKS 256u     /* what eviction frees at once: 1 MiB */
#define ID_SIZE 65            /* 64 hexadecimal digits and the end of the string */

enum chunk_state { CHUNK_ABSENT = 0x00, CHUNK_PRESENT = 0x5a, CHUNK_SUSPECT = 0xa5 };

struct chunk {
    uint8_t digest[32];
    uint32_t block; /* first one, in blocks of the blob */
    uint32_t size;  /* bytes */
};

struct job;
struct trace;

struct blob {
    char id[ID_SIZE];
    uint64_t nodeid; /* from the digest: the same in every process that serves the connection */
    uint64_t length;
    uint32_t count;
    struct chunk *chunks;
    int data; /* blobs/<id>, locked for this process */
    uint64_t inode; /* of it */
    size_t map_size;
    void *map;
    _Atomic uint8_t *states; /* behind the header of the map */
    uint32_t groups;
    uint32_t *group_first; /* chunk that begins first in the group; `groups + 1` of them */
    _Atomic uint32_t *readers;
    _Atomic uint8_t *referenced; /* second chance, by group */
    _Atomic uint32_t refs;
    _Atomic bool traced;
    _Atomic bool removed; /* from the registry: no new jobs */

    pthread_mutex_t lock; /* all below, every change of `states`, and `busy` */
    uint8_t *busy;        /* 1: a fetch of this chunk is under way */
    uint8_t *wanted;      /* 1: a prefetch of this chunk is queued */
    uint32_t present;     /* chunks */
    uint64_t bytes;       /* of PRESENT and SUSPECT chunks, whole blocks */
    struct source source; /* a fetch takes a copy: it may be changed under way */
    bool pinned;
    _Atomic bool watched; /* reads of the data file wait for us; preaccess.c */
    uint32_t holds; /* layers mounted on the data file: it stays as it is */
    struct job *jobs; /* reads that wait for chunks */

    struct blob *next; /* of the removed ones; cache.c */
};

static inline uint32_t chunk_blocks(const struct chunk *chunk)
{
    return (chunk->size + BLOCK - 1) / BLOCK;
}

static inline uint64_t chunk_offset(const struct chunk *chunk)
{
    return (uint64_t)chunk->block * BLOCK;
}

static inline uint64_t chunk_end(const struct chunk *chunk)
{
    return chunk_offset(chunk) + (uint64_t)chunk_blocks(chunk) * BLOCK;
}

static inline uint32_t chunk_group(const struct chunk *chunk)
{
    return chunk->block / GROUP_BLOCKS;
}

static inline uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

bool blob_id_valid(const char *id, size_t n);
/* Read the index, prove it by the id, open the cache. 0 or a negative errno with the reason in `why`:
 * -EBADMSG the index is not that of the id, -EBUSY another process serves this cache. */
int blob_open(int cache, const char *id, struct blob **opened, const char **why);
void blob_close(struct blob *blob);
static inline struct blob *blob_ref(struct blob *blob)
{
    atomic_fetch_add(&blob->refs, 1);
    return blob;
}

/* Change where fetches that begin from now on read; `source` gets the old one. */
void blob_swap_source(struct blob *blob, struct source *source);

/* Index of the chunk that holds byte `offset`, which must be below the length. */
uint32_t blob_find(const struct blob *blob, uint64_t offset);

static inline uint8_t blob_state(const struct blob *blob, uint32_t chunk)
{
    return atomic_load(&blob->states[chunk]);
}

/* Hold the chunks [first, last]: true when all are present; then they stay until blob_release. */
bool blob_hold(struct blob *blob, uint32_t first, uint32_t last);
void blob_release(struct blob *blob, uint32_t first, uint32_t last);

/* With the lock held. */
void blob_set_present(struct blob *blob, uint32_t chunk);
void blob_set_absent(struct blob *blob, uint32_t chunk);

#endif
