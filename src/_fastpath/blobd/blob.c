#include "blobd/blob.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "blobd/digest.h"

#define INDEX_MAGIC "DSECIDX1"
#define INDEX_HEADER 16u
#define INDEX_ENTRY 40u
#define MAP_MAGIC "DSECMAP1"

/* All of the first block of a map. */
struct map_header {
    char magic[8];
    char boot[40]; /* /proc/sys/kernel/random/boot_id */
    char id[ID_SIZE + 7];
    uint64_t inode; /* of the data file that the map speaks of */
    uint32_t count;
    uint8_t rest[BLOCK - 8 - 40 - ID_SIZE - 7 - 8 - 4];
};
_Static_assert(sizeof(struct map_header) == BLOCK, "the header is one block");

bool blob_id_valid(const char *id, size_t n)
{
    if (n != ID_SIZE - 1)
        return false;
    for (size_t i = 0; i < n; i++)
        if (!((id[i] >= '0' && id[i] <= '9') || (id[i] >= 'a' && id[i] <= 'f')))
            return false;
    return true;
}

static void from_hex(const char *id, uint8_t digest[32])
{
    for (int i = 0; i < 32; i++) {
        unsigned value;
        sscanf(id + 2 * i, "%2x", &value);
        digest[i] = (uint8_t)value;
    }
}

static uint32_t get_u32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static int read_all(int fd, uint8_t *data, size_t size)
{
    for (size_t done = 0; done < size;) {
        ssize_t n = pread(fd, data + done, size - done, (off_t)done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n < 0 ? -errno : -EBADMSG;
        done += (size_t)n;
    }
    return 0;
}

/* The whole file in memory: a mapping could change after the check. */
static int load_index(int cache, const char *id, uint8_t **data, size_t *size)
{
    char path[16 + ID_SIZE];
    struct stat st;

    snprintf(path, sizeof path, "indexes/%s", id);
    int fd = openat(cache, path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return -errno;
    int error = fstat(fd, &st) < 0 ? -errno : 0;
    *size = (size_t)st.st_size;
    if (!error && (!S_ISREG(st.st_mode) || *size < INDEX_HEADER + INDEX_ENTRY ||
                   *size > INDEX_HEADER + (size_t)CHUNKS_MAX * INDEX_ENTRY))
        error = -EBADMSG;
    *data = error ? NULL : malloc(*size);
    if (!error)
        error = *data ? read_all(fd, *data, *size) : -ENOMEM;
    close(fd);
    return error;
}

static int parse_index(struct blob *blob, const uint8_t *data, size_t size)
{
    uint8_t expected[32];
    uint64_t block = 0;

    from_hex(blob->id, expected);
    if (!sha256_is(data, size, expected) || memcmp(data, INDEX_MAGIC, 8) != 0 ||
        get_u32(data + 12) != 0)
        return -EBADMSG;
    blob->count = get_u32(data + 8);
    if (blob->count == 0 || INDEX_HEADER + (uint64_t)blob->count * INDEX_ENTRY != size)
        return -EBADMSG;
    blob->chunks = calloc(blob->count, sizeof *blob->chunks);
    if (!blob->chunks)
        return -ENOMEM;
    for (uint32_t i = 0; i < blob->count; i++) {
        const uint8_t *entry = data + INDEX_HEADER + (size_t)i * INDEX_ENTRY;
        struct chunk *chunk = &blob->chunks[i];
        memcpy(chunk->digest, entry, 32);
        chunk->block = get_u32(entry + 32);
        chunk->size = get_u32(entry + 36);
        if (chunk->block != block || chunk->size == 0 || chunk->size > CHUNK_MAX)
            return -EBADMSG;
        block += chunk_blocks(chunk);
    }
    blob->length = block * BLOCK;
    blob->nodeid = 0;
    for (int i = 0; i < 8; i++)
        blob->nodeid = blob->nodeid << 8 | expected[i];
    blob->nodeid |= 1ULL << 63; /* never 0 and never the root's 1 */
    return 0;
}

static int make_groups(struct blob *blob)
{
    blob->groups = (uint32_t)((blob->length / BLOCK + GROUP_BLOCKS - 1) / GROUP_BLOCKS);
    blob->group_first = calloc(blob->groups + 1, sizeof *blob->group_first);
    blob->readers = calloc(blob->groups, sizeof *blob->readers);
    blob->referenced = calloc(blob->groups, 1);
    blob->busy = calloc(blob->count, 1);
    blob->wanted = calloc(blob->count, 1);
    if (!blob->group_first || !blob->readers || !blob->referenced || !blob->busy || !blob->wanted)
        return -ENOMEM;
    for (uint32_t group = 0, chunk = 0; group <= blob->groups; group++) {
        while (chunk < blob->count && chunk_group(&blob->chunks[chunk]) < group)
            chunk++;
        blob->group_first[group] = chunk;
    }
    return 0;
}

static int open_data(struct blob *blob, int cache, struct stat *st)
{
    char path[16 + ID_SIZE];

    snprintf(path, sizeof path, "blobs/%s", blob->id);
    blob->data = openat(cache, path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (blob->data < 0 || flock(blob->data, LOCK_EX | LOCK_NB) < 0)
        return errno == EWOULDBLOCK ? -EBUSY : -errno;
    if (fstat(blob->data, st) < 0)
        return -errno;
    if ((uint64_t)st->st_size != blob->length && ftruncate(blob->data, (off_t)blob->length) < 0)
        return -errno;
    return 0;
}

static void read_boot(char boot[40])
{
    memset(boot, 0, 40);
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd >= 0 && read(fd, boot, 36) != 36)
        memset(boot, 0, 40);
    if (fd >= 0)
        close(fd);
}

/* Map the map. `trusted`: written by a process of this boot for this very data file. */
static int open_map(struct blob *blob, int cache, uint64_t inode, bool *trusted)
{
    char path[16 + ID_SIZE];
    struct map_header wanted = { .magic = MAP_MAGIC, .inode = inode, .count = blob->count };
    struct stat st = { 0 };

    memcpy(wanted.id, blob->id, ID_SIZE);
    read_boot(wanted.boot);
    snprintf(path, sizeof path, "maps/%s", blob->id);
    int fd = openat(cache, path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return -errno;
    blob->map_size = BLOCK + blob->count;
    int error = fstat(fd, &st) < 0 ? -errno : 0;
    bool sized = (size_t)st.st_size == blob->map_size;
    if (!error && !sized && ftruncate(fd, (off_t)blob->map_size) < 0)
        error = -errno;
    if (!error) /* a hole would be a SIGBUS when the disk is full */
        error = -posix_fallocate(fd, 0, (off_t)blob->map_size);
    if (!error) {
        blob->map = mmap(NULL, blob->map_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        error = blob->map == MAP_FAILED ? -errno : 0;
    }
    close(fd);
    if (error) {
        blob->map = NULL;
        return error;
    }
    struct map_header *header = blob->map;
    *trusted = sized && wanted.boot[0] && memcmp(header, &wanted, sizeof wanted) == 0;
    blob->states = (_Atomic uint8_t *)blob->map + BLOCK;
    for (uint32_t i = 0; i < blob->count && *trusted; i++) {
        uint8_t state = blob->states[i];
        *trusted = state == CHUNK_ABSENT || state == CHUNK_PRESENT || state == CHUNK_SUSPECT;
    }
    if (!*trusted)
        for (uint32_t i = 0; i < blob->count; i++)
            if (blob->states[i] != CHUNK_ABSENT)
                blob->states[i] = CHUNK_SUSPECT; /* before the header says otherwise */
    memcpy(header, &wanted, sizeof wanted);
    return 0;
}

/* Bring the states in line with the file: what is a hole is absent, whatever the map says; what has
 * data and is not known to be checked is suspect. */
static void compare_with_file(struct blob *blob, bool trusted)
{
    uint64_t start = 0, end = 0; /* the extent at hand */

    for (uint32_t i = 0; i < blob->count; i++) {
        const struct chunk *chunk = &blob->chunks[i];
        while (end < chunk_end(chunk) && start < blob->length && start <= chunk_offset(chunk)) {
            off_t data = lseek(blob->data, (off_t)end, SEEK_DATA);
            start = data < 0 ? blob->length : (uint64_t)data;
            off_t hole = data < 0 ? -1 : lseek(blob->data, data, SEEK_HOLE);
            end = hole < 0 ? blob->length : (uint64_t)hole;
        }
        uint8_t state = blob->states[i];
        if (start > chunk_offset(chunk) || end < chunk_end(chunk))
            state = CHUNK_ABSENT;
        else if (!trusted || state != CHUNK_PRESENT)
            state = CHUNK_SUSPECT;
        blob->states[i] = state;
        blob->present += state == CHUNK_PRESENT;
        blob->bytes += state == CHUNK_ABSENT ? 0 : (uint64_t)chunk_blocks(chunk) * BLOCK;
    }
}

static int open_parts(int cache, struct blob *blob, const char **why)
{
    uint8_t *index = NULL;
    size_t size = 0;
    struct stat st = { 0 };
    bool trusted = false;

    *why = "the index";
    int error = load_index(cache, blob->id, &index, &size);
    if (!error)
        error = parse_index(blob, index, size);
    free(index);
    if (!error)
        error = make_groups(blob);
    if (error)
        return error;
    *why = "the cache file";
    error = open_data(blob, cache, &st);
    if (error)
        return error;
    *why = "the map";
    blob->inode = st.st_ino;
    error = open_map(blob, cache, st.st_ino, &trusted);
    if (!error)
        compare_with_file(blob, trusted);
    return error;
}

int blob_open(int cache, const char *id, struct blob **opened, const char **why)
{
    struct blob *blob = calloc(1, sizeof *blob);

    *why = "memory";
    if (!blob)
        return -ENOMEM;
    memcpy(blob->id, id, ID_SIZE);
    blob->data = -1;
    atomic_store(&blob->refs, 1);
    pthread_mutex_init(&blob->lock, NULL);
    int error = open_parts(cache, blob, why);
    if (error)
        blob_close(blob);
    else
        *opened = blob;
    return error;
}

void blob_close(struct blob *blob)
{
    if (blob->map)
        munmap(blob->map, blob->map_size);
    if (blob->data >= 0)
        close(blob->data);
    free(blob->chunks);
    free(blob->group_first);
    free(blob->readers);
    free(blob->referenced);
    free(blob->busy);
    free(blob->wanted);
    source_free(&blob->source);
    pthread_mutex_destroy(&blob->lock);
    free(blob);
}

void blob_swap_source(struct blob *blob, struct source *source)
{
    pthread_mutex_lock(&blob->lock);
    struct source old = blob->source;
    blob->source = *source;
    *source = old;
    pthread_mutex_unlock(&blob->lock);
}

uint32_t blob_find(const struct blob *blob, uint64_t offset)
{
    uint32_t low = 0, high = blob->count - 1, block = (uint32_t)(offset / BLOCK);

    while (low < high) {
        uint32_t middle = low + (high - low + 1) / 2;
        if (blob->chunks[middle].block <= block)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

static void count_readers(struct blob *blob, uint32_t first, uint32_t last, uint32_t change)
{
    uint32_t to = chunk_group(&blob->chunks[last]);

    for (uint32_t group = chunk_group(&blob->chunks[first]); group <= to; group++)
        atomic_fetch_add(&blob->readers[group], change);
}

bool blob_hold(struct blob *blob, uint32_t first, uint32_t last)
{
    count_readers(blob, first, last, 1);
    for (uint32_t i = first; i <= last; i++) {
        if (blob_state(blob, i) != CHUNK_PRESENT) {
            count_readers(blob, first, last, UINT32_MAX);
            return false;
        }
        uint32_t group = chunk_group(&blob->chunks[i]);
        if (!atomic_load_explicit(&blob->referenced[group], memory_order_relaxed))
            atomic_store_explicit(&blob->referenced[group], 1, memory_order_relaxed);
    }
    return true;
}

void blob_release(struct blob *blob, uint32_t first, uint32_t last)
{
    count_readers(blob, first, last, UINT32_MAX);
}

void blob_set_present(struct blob *blob, uint32_t chunk)
{
    uint8_t before = blob_state(blob, chunk);

    if (before == CHUNK_PRESENT)
        return;
    if (before == CHUNK_ABSENT)
        blob->bytes += (uint64_t)chunk_blocks(&blob->chunks[chunk]) * BLOCK;
    blob->present++;
    atomic_store(&blob->referenced[chunk_group(&blob->chunks[chunk])], 1);
    atomic_store(&blob->states[chunk], CHUNK_PRESENT); /* after the data is in the file */
}

void blob_set_absent(struct blob *blob, uint32_t chunk)
{
    uint8_t before = blob_state(blob, chunk);

    if (before == CHUNK_ABSENT)
        return;
    blob->bytes -= (uint64_t)chunk_blocks(&blob->chunks[chunk]) * BLOCK;
    blob->present -= before == CHUNK_PRESENT;
    atomic_store(&blob->states[chunk], CHUNK_ABSENT);
}
