/* The other way to serve a layer: it is mounted on the sparse cache files, and a fanotify group lets
 * each read of a file that is not whole wait until its range was filled (FAN_PRE_ACCESS, Linux 6.14,
 * include/uapi/linux/fanotify.h). It fails open: when the last descriptor of the group is closed the
 * kernel lets every read go on, and holes are zeros. So keeper, worker and dsecd each hold one.
 *
 * An event that was read and not answered waits until somebody writes the number of its descriptor
 * to the group; whoever does need not have that descriptor. So events are read into slots of memory
 * that the others hold, too, and the next worker answers those of a dead one. It keeps their numbers
 * occupied until then, for the kernel finds an event by number alone.
 *
 * What this process itself reads and writes in such a file asks as well, and is let go on. The
 * threads here never touch one, so they are always there to do it.
 */
#include "blobd/preaccess.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/fanotify.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "blobd/fetch.h"
#include "blobd/log.h"

#ifndef FAN_PRE_ACCESS
#define FAN_PRE_ACCESS 0x00100000
#endif
#define INFO_RANGE 6 /* FAN_EVENT_INFO_TYPE_RANGE */
#define DENY_EIO (FAN_DENY | (uint32_t)EIO << 24) /* FAN_DENY_ERRNO */
#define SLOTS 16384u
#define THREADS 2

enum slot_state { SLOT_FREE, SLOT_TAKEN, SLOT_KNOWN };

struct info_range {
    struct fanotify_event_info_header header;
    uint32_t rest;
    uint64_t offset, count;
};

/* All zeros at first. Only what a thread took is in it; it is free again when it was answered. */
struct slot {
    _Atomic uint32_t state;
    char id[ID_SIZE]; /* when KNOWN */
    struct {
        struct fanotify_event_metadata metadata; /* event_len 0: the read had not happened */
        struct info_range range;
    } event; /* room for one and not for two */
};

static int group = -1;
static struct slot *slots;
static bool ours[SLOTS]; /* the descriptor of the event is this process's */

bool preaccess_enabled(void)
{
    return group >= 0;
}

int preaccess_watch(struct blob *blob)
{
    if (!blob->watched && fanotify_mark(group, FAN_MARK_ADD, FAN_PRE_ACCESS, blob->data, NULL) < 0)
        return -errno;
    blob->watched = true;
    return 0;
}

void preaccess_unwatch(struct blob *blob)
{
    if (blob->watched &&
        fanotify_mark(group, FAN_MARK_REMOVE, FAN_PRE_ACCESS, blob->data, NULL) < 0)
        log_line(LOG_WARNING, "cannot stop watching", blob->id, "%s", strerror(errno));
    blob->watched = false;
}

static void answer(struct slot *slot, bool allow)
{
    struct fanotify_response response = { .fd = slot->event.metadata.fd,
                                          .response = allow ? FAN_ALLOW : DENY_EIO };
    bool close_it = ours[slot - slots];

    /* ENOENT: who read was killed, or a dead process had answered already. */
    if (write(group, &response, sizeof response) < 0 && errno != ENOENT)
        log_line(LOG_ERROR, "cannot answer a read", NULL, "%s", strerror(errno));
    atomic_store(&slot->state, SLOT_FREE);
    if (close_it) /* not earlier: its number would be another event's */
        close(response.fd);
}

void preaccess_answer(uint64_t unique, bool allow)
{
    answer(&slots[unique & ~PREACCESS_UNIQUE], allow);
}

/* The blob of an event; the events of this thread's own process never get here. */
static struct blob *find(int fd)
{
    struct stat st;
    struct blob *blob = NULL;

    if (fstat(fd, &st) < 0)
        return NULL;
    for (size_t n = 0; (blob = cache_at(n)); n++) {
        if (blob->inode == st.st_ino)
            return blob;
        cache_unref(blob);
    }
    return NULL;
}

/* No more events of a whole blob: it stays whole while it is held. */
static void leave_whole(struct blob *blob)
{
    if (!atomic_load(&blob->watched)) /* rarely true for long; looked at again with the lock */
        return;
    pthread_mutex_lock(&blob->lock);
    if (blob->present == blob->count)
        preaccess_unwatch(blob);
    pthread_mutex_unlock(&blob->lock);
}

/* Answer the event now or later; takes the reference over. */
static void serve(struct slot *slot, struct blob *blob)
{
    const struct info_range *range = &slot->event.range;
    bool known = slot->event.metadata.event_len >= sizeof slot->event &&
                 range->header.info_type == INFO_RANGE && range->count <= UINT32_MAX;

    if (!known) {
        log_line(LOG_ERROR, "a read of unknown extent was refused", blob->id, NULL);
        answer(slot, false);
    } else if (range->count == 0 || range->offset >= blob->length) {
        answer(slot, true);
    } else {
        uint64_t left = blob->length - range->offset;
        leave_whole(blob);
        serve_read(blob, PREACCESS_UNIQUE | (uint64_t)(slot - slots), range->offset,
                   (uint32_t)(left < range->count ? left : range->count), 0);
        return; /* with the reference */
    }
    cache_unref(blob);
}

static void take(struct slot *slot)
{
    if (slot->event.metadata.pid == getpid()) {
        answer(slot, true);
        return;
    }
    struct blob *blob = find(slot->event.metadata.fd);
    if (!blob) {
        log_line(LOG_ERROR, "a read of a file that is no blob was refused", NULL, NULL);
        answer(slot, false);
        return;
    }
    memcpy(slot->id, blob->id, ID_SIZE);
    atomic_store(&slot->state, SLOT_KNOWN);
    serve(slot, blob);
}

static struct slot *free_slot(void)
{
    for (uint32_t i = 0;; i = (i + 1) % SLOTS) {
        uint32_t expected = SLOT_FREE;
        if (atomic_load(&slots[i].state) == SLOT_FREE) {
            slots[i].event.metadata.event_len = 0;
            if (atomic_compare_exchange_strong(&slots[i].state, &expected, SLOT_TAKEN))
                return &slots[i];
        }
        if (i == SLOTS - 1) /* as many reads wait for the store */
            nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
    }
}

static void *watch(void *unused)
{
    struct slot *slot = free_slot();

    for (;;) {
        ssize_t n = read(group, &slot->event, sizeof slot->event);
        if (n < (ssize_t)sizeof slot->event.metadata) { /* the kernel has refused it, or a signal */
            if (n < 0 && errno != EINTR && errno != EAGAIN)
                log_line(LOG_ERROR, "cannot take a read", NULL, "%s", strerror(errno));
            continue;
        }
        ours[slot - slots] = true;
        take(slot);
        slot = free_slot();
    }
    return unused;
}

int preaccess_open(int group_fd, int slots_fd)
{
    struct stat st;
    size_t size = SLOTS * sizeof *slots;

    if (fstat(slots_fd, &st) < 0 || (st.st_size == 0 && ftruncate(slots_fd, (off_t)size) < 0))
        return -errno;
    if (st.st_size != 0 && (size_t)st.st_size != size)
        return -EPROTO; /* of another version */
    slots = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, slots_fd, 0);
    if (slots == MAP_FAILED)
        return -errno;
    group = group_fd;
    for (uint32_t i = 0; i < SLOTS; i++) {
        int fd = slots[i].event.metadata.fd;
        if (slots[i].state == SLOT_FREE)
            continue;
        if (slots[i].event.metadata.event_len == 0)
            slots[i].state = SLOT_FREE;
        else if (fcntl(fd, F_GETFD) < 0) /* a number in use is none of a new event either */
            ours[i] = dup3(slots_fd, fd, O_CLOEXEC) >= 0;
    }
    return 0;
}

bool preaccess_start(void)
{
    static bool pending[SLOTS];

    for (uint32_t i = 0; i < SLOTS; i++)
        pending[i] = slots[i].state != SLOT_FREE;
    for (int i = 0; i < THREADS; i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, watch, NULL) != 0)
            return false;
        pthread_detach(thread);
    }
    for (uint32_t i = 0; i < SLOTS; i++) {
        struct blob *blob = pending[i] && slots[i].state == SLOT_KNOWN ? cache_find(slots[i].id) : NULL;
        if (blob)
            serve(&slots[i], blob);
        else if (pending[i])
            answer(&slots[i], false); /* of which blob is not known; a later read asks again */
    }
    return true;
}
