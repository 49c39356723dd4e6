#include "blobd/cache.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "blobd/holds.h"
#include "blobd/log.h"

#define SECOND 1000000000ull
#define CLOSING_TRIES 500 /* milliseconds */

struct limits limits = {
    .demand_ns = 120 * SECOND,
    .attempt_ns = 10 * SECOND,
    .fetch_min = 128 << 10,
    .fetch_max = 1 << 20,
};
struct counters counters;

static int directory = -1, blobs_directory = -1;
static _Atomic uint64_t used;
static _Atomic bool foreign_left = true; /* perhaps there are files of unregistered blobs */

static pthread_rwlock_t registry_lock = PTHREAD_RWLOCK_INITIALIZER;
static struct blob **registry; /* sorted by node id */
static size_t registered, capacity;

/* Removed blobs that a fetch or a read still holds; a member leaves before it is closed. */
static pthread_mutex_t leaving_lock = PTHREAD_MUTEX_INITIALIZER;
static struct blob *leaving;

static pthread_mutex_t evicting = PTHREAD_MUTEX_INITIALIZER;
static size_t hand_blob;
static uint32_t hand_group;

int cache_directory(void)
{
    return directory;
}

uint64_t cache_used(void)
{
    return atomic_load(&used);
}

/* --- the registry -------------------------------------------------------------------------- */

/* Position of `nodeid`, or where it belongs. */
static size_t position(uint64_t nodeid)
{
    size_t low = 0, high = registered;

    while (low < high) {
        size_t middle = (low + high) / 2;
        if (registry[middle]->nodeid < nodeid)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct blob *cache_find_node(uint64_t nodeid)
{
    struct blob *blob = NULL;

    pthread_rwlock_rdlock(&registry_lock);
    size_t at = position(nodeid);
    if (at < registered && registry[at]->nodeid == nodeid)
        blob = blob_ref(registry[at]);
    pthread_rwlock_unlock(&registry_lock);
    return blob;
}

struct blob *cache_find(const char *id)
{
    char prefix[17] = { 0 };

    memcpy(prefix, id, 16);
    struct blob *blob = cache_find_node(strtoull(prefix, NULL, 16) | 1ULL << 63);
    if (blob && strcmp(blob->id, id) != 0) {
        cache_unref(blob);
        blob = NULL;
    }
    return blob;
}

struct blob *cache_at(size_t n)
{
    struct blob *blob = NULL;

    pthread_rwlock_rdlock(&registry_lock);
    if (n < registered)
        blob = blob_ref(registry[n]);
    pthread_rwlock_unlock(&registry_lock);
    return blob;
}

size_t cache_count(void)
{
    pthread_rwlock_rdlock(&registry_lock);
    size_t count = registered;
    pthread_rwlock_unlock(&registry_lock);
    return count;
}

void cache_unref(struct blob *blob)
{
    struct stat st;

    if (atomic_fetch_sub(&blob->refs, 1) != 1)
        return;
    pthread_mutex_lock(&leaving_lock);
    for (struct blob **at = &leaving; *at; at = &(*at)->next)
        if (*at == blob) {
            *at = blob->next;
            break;
        }
    pthread_mutex_unlock(&leaving_lock);
    /* Its bytes stay counted, now as those of a file that nobody has registered. */
    if (fstat(blob->data, &st) == 0)
        atomic_fetch_add(&used, (uint64_t)st.st_blocks * 512 - blob->bytes);
    blob_close(blob);
    atomic_store(&foreign_left, true);
}

static int insert(struct blob *blob)
{
    size_t at = position(blob->nodeid);

    if (at < registered && registry[at]->nodeid == blob->nodeid)
        return -EEXIST; /* another blob with the same 63 bits: refused, never mixed up */
    if (registered == capacity) {
        size_t grown = capacity ? 2 * capacity : 64;
        struct blob **more = realloc(registry, grown * sizeof *more);
        if (!more)
            return -ENOMEM;
        registry = more;
        capacity = grown;
    }
    memmove(registry + at + 1, registry + at, (registered - at) * sizeof *registry);
    registry[at] = blob;
    registered++;
    return 0;
}

static uint64_t file_bytes(const char *id)
{
    struct stat st;
    return fstatat(blobs_directory, id, &st, AT_SYMLINK_NOFOLLOW) == 0 ? (uint64_t)st.st_blocks * 512
                                                                        : 0;
}

static bool ref_unless_closing(struct blob *blob)
{
    uint32_t refs = atomic_load(&blob->refs);

    while (refs && !atomic_compare_exchange_weak(&blob->refs, &refs, refs + 1))
        ;
    return refs != 0;
}

/* Take a blob back that was removed a moment ago: its file is locked by ourselves until it closes. */
static struct blob *take_back(const char *id)
{
    struct blob *found = NULL;

    pthread_mutex_lock(&leaving_lock);
    for (struct blob **at = &leaving; *at; at = &(*at)->next) {
        if (strcmp((*at)->id, id) != 0)
            continue;
        if (ref_unless_closing(*at)) {
            found = *at;
            *at = found->next;
            atomic_store(&found->removed, false);
        }
        break;
    }
    pthread_mutex_unlock(&leaving_lock);
    return found;
}

/* The blob, open, with a reference for the caller; its bytes are counted. */
static int open_blob(const char *id, struct blob **opened, const char **why)
{
    int error = -EBUSY;

    for (int tries = 0; tries < CLOSING_TRIES && error == -EBUSY; tries++) {
        *opened = take_back(id);
        if (*opened)
            return 0;
        uint64_t before = file_bytes(id);
        error = blob_open(directory, id, opened, why);
        if (!error)
            atomic_fetch_add(&used, (*opened)->bytes - before);
        if (error == -EBUSY) /* perhaps by ourselves, just being closed */
            nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
    }
    return error;
}

int cache_add(const char *id, struct source *source, struct blob **added, const char **why)
{
    struct blob *blob = NULL;

    /* Not while a file that seems unregistered is being removed. */
    pthread_mutex_lock(&evicting);
    int error = open_blob(id, &blob, why);
    if (!error) {
        blob_swap_source(blob, source);
        holds_apply(blob);
        *why = "its number";
        pthread_rwlock_wrlock(&registry_lock);
        error = insert(blob);
        if (!error)
            blob_ref(blob);
        pthread_rwlock_unlock(&registry_lock);
        if (error)
            cache_unref(blob);
    }
    pthread_mutex_unlock(&evicting);
    if (!error)
        *added = blob;
    return error;
}

int cache_remove(const char *id)
{
    struct blob *blob = cache_find(id);
    int error = 0;

    if (!blob)
        return -ENOENT;
    pthread_mutex_lock(&blob->lock);
    error = blob->pinned || blob->holds ? -EBUSY : 0;
    blob->removed = blob->removed || !error;
    pthread_mutex_unlock(&blob->lock);
    if (!error) {
        pthread_rwlock_wrlock(&registry_lock);
        size_t at = position(blob->nodeid);
        bool found = at < registered && registry[at] == blob;
        if (found) {
            registered--;
            memmove(registry + at, registry + at + 1, (registered - at) * sizeof *registry);
        }
        pthread_rwlock_unlock(&registry_lock);
        if (found) {
            pthread_mutex_lock(&leaving_lock);
            blob->next = leaving;
            leaving = blob;
            pthread_mutex_unlock(&leaving_lock);
            cache_unref(blob);
        }
    }
    cache_unref(blob);
    return error;
}

/* --- room ---------------------------------------------------------------------------------- */

/* Free a chunk's blocks where the same run of blocks ends; the lock of the blob is held. */
static void punch(struct blob *blob, uint64_t from, uint64_t to)
{
    if (from < to && fallocate(blob->data, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)from,
                               (off_t)(to - from)) < 0)
        log_line(LOG_WARNING, "cannot free a part of the cache", blob->id, "%s", strerror(errno));
}

static bool evictable(struct blob *blob, uint32_t chunk)
{
    return !blob->busy[chunk] && blob_state(blob, chunk) != CHUNK_ABSENT;
}

/* Take the states away, then look whether somebody reads; the lock of the blob is held. */
static bool take_group(struct blob *blob, uint32_t group, uint8_t *before)
{
    uint32_t first = blob->group_first[group], end = blob->group_first[group + 1];
    bool any = false;

    for (uint32_t i = first; i < end; i++) {
        before[i - first] = CHUNK_ABSENT;
        if (!evictable(blob, i))
            continue;
        before[i - first] = blob_state(blob, i);
        atomic_store(&blob->states[i], CHUNK_ABSENT);
        any = true;
    }
    if (any && atomic_load(&blob->readers[group]) == 0)
        return true;
    for (uint32_t i = first; i < end; i++)
        if (before[i - first] != CHUNK_ABSENT)
            atomic_store(&blob->states[i], before[i - first]);
    return false;
}

static uint64_t evict_group(struct blob *blob, uint32_t group)
{
    uint8_t before[GROUP_BLOCKS]; /* a group has at most one chunk per block */
    uint32_t first = blob->group_first[group], end = blob->group_first[group + 1];
    uint64_t freed = blob->bytes, from = 0, to = 0;

    if (!take_group(blob, group, before))
        return 0;
    for (uint32_t i = first; i < end; i++) {
        const struct chunk *chunk = &blob->chunks[i];
        if (before[i - first] == CHUNK_ABSENT)
            continue;
        if (chunk_offset(chunk) != to) {
            punch(blob, from, to);
            from = chunk_offset(chunk);
        }
        to = chunk_end(chunk);
        blob->bytes -= (uint64_t)chunk_blocks(chunk) * BLOCK;
        blob->present -= before[i - first] == CHUNK_PRESENT;
    }
    punch(blob, from, to);
    return freed - blob->bytes;
}

/* Look at one group under the hand. */
static uint64_t pass(struct blob *blob, uint32_t group)
{
    uint64_t freed = 0;

    pthread_mutex_lock(&blob->lock);
    if (!blob->pinned && !blob->holds && !blob->removed && blob->bytes) {
        if (atomic_load(&blob->referenced[group]))
            atomic_store(&blob->referenced[group], 0);
        else
            freed = evict_group(blob, group);
    }
    pthread_mutex_unlock(&blob->lock);
    return freed;
}

/* Go on with the clock until something was freed, at most two rounds; `evicting` is held. */
static uint64_t evict_registered(void)
{
    size_t rounds = 2 * cache_count() + 1;
    struct blob *blob = cache_at(hand_blob);

    while (rounds > 0) {
        if (!blob || hand_group >= blob->groups) {
            if (blob)
                cache_unref(blob);
            hand_group = 0;
            hand_blob = hand_blob + 1 < cache_count() ? hand_blob + 1 : 0;
            blob = cache_at(hand_blob);
            rounds--;
            if (!blob)
                return 0;
            continue;
        }
        uint64_t freed = pass(blob, hand_group++);
        if (freed) {
            cache_unref(blob);
            atomic_fetch_add(&counters.evicted_bytes, freed);
            return freed;
        }
    }
    if (blob)
        cache_unref(blob);
    return 0;
}

/* Remove the file of one unregistered blob. Its lock tells whether it is still being read. */
static uint64_t remove_foreign(const char *id)
{
    int fd = openat(blobs_directory, id, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    uint64_t bytes = file_bytes(id);
    char map[16 + ID_SIZE] = "../maps/";

    if (fd < 0 || flock(fd, LOCK_EX | LOCK_NB) < 0)
        bytes = 0;
    else {
        strcat(map, id);
        unlinkat(blobs_directory, map, 0);
        if (unlinkat(blobs_directory, id, 0) < 0)
            bytes = 0;
    }
    if (fd >= 0)
        close(fd);
    return bytes;
}

static bool is_registered(const char *id)
{
    struct blob *blob = cache_find(id);
    if (blob)
        cache_unref(blob);
    return blob != NULL;
}

static uint64_t evict_foreign(void)
{
    bool any = atomic_exchange(&foreign_left, false);
    int fd = any ? openat(blobs_directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    DIR *list = fd < 0 ? NULL : fdopendir(fd);
    uint64_t freed = 0;

    if (!list) {
        if (fd >= 0)
            close(fd);
        return 0;
    }
    for (struct dirent *entry = readdir(list); entry && !freed; entry = readdir(list))
        if (blob_id_valid(entry->d_name, strlen(entry->d_name)) && !is_registered(entry->d_name))
            freed = remove_foreign(entry->d_name);
    closedir(list);
    if (freed)
        atomic_store(&foreign_left, true);
    atomic_fetch_add(&counters.evicted_bytes, freed);
    return freed;
}

static bool evict(void)
{
    uint64_t freed = evict_foreign();

    if (!freed)
        freed = evict_registered();
    atomic_fetch_sub(&used, freed);
    return freed != 0;
}

bool cache_reserve(uint64_t bytes)
{
    bool room = true;

    if (!limits.cache_bytes || atomic_load(&used) + bytes <= limits.cache_bytes) {
        atomic_fetch_add(&used, bytes); /* two at once may pass the bound by one request */
        return true;
    }
    pthread_mutex_lock(&evicting);
    while (room && limits.cache_bytes && atomic_load(&used) + bytes > limits.cache_bytes)
        room = evict();
    if (room)
        atomic_fetch_add(&used, bytes);
    pthread_mutex_unlock(&evicting);
    return room;
}

void cache_unreserve(uint64_t bytes)
{
    atomic_fetch_sub(&used, bytes);
}

bool cache_shrink(uint64_t bytes)
{
    uint64_t before = atomic_load(&used);
    bool room = true;

    pthread_mutex_lock(&evicting);
    while (room && before - atomic_load(&used) < bytes && atomic_load(&used) <= before)
        room = evict();
    pthread_mutex_unlock(&evicting);
    return room;
}

int cache_open(const char *path)
{
    directory = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (directory < 0)
        return -errno;
    for (int i = 0; i < 3; i++)
        if (mkdirat(directory, (const char *[]){ "blobs", "maps", "indexes" }[i], 0700) < 0 &&
            errno != EEXIST)
            return -errno;
    blobs_directory = openat(directory, "blobs", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int fd = blobs_directory < 0 ? -1 : openat(blobs_directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *list = fd < 0 ? NULL : fdopendir(fd);
    if (!list)
        return -errno;
    for (struct dirent *entry = readdir(list); entry; entry = readdir(list))
        if (blob_id_valid(entry->d_name, strlen(entry->d_name)))
            atomic_fetch_add(&used, file_bytes(entry->d_name));
    closedir(list);
    return 0;
}
