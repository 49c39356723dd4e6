#include "loop.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define BATCH 32
#define TABLE_BYTES (5u << 20) /* of address space; the sizes of limits.h fit */

static int epoll_fd = -1;
static struct epoll_event batch[BATCH];
static int batch_n;
static uint8_t *tables;
static size_t tables_used;
static uint64_t stopped_us, stood_us; /* when the clock was stopped (0: it goes), how long in all */

int loop_open(void)
{
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    return epoll_fd < 0 ? -errno : 0;
}

/* A handler may close any other source: its event in the running batch must not be delivered. */
static void forget_pending(struct source *source)
{
    for (int i = 0; i < batch_n; i++)
        if (batch[i].data.ptr == source)
            batch[i].data.ptr = NULL;
}

void loop_round(int timeout_ms)
{
    batch_n = epoll_wait(epoll_fd, batch, BATCH, timeout_ms);
    for (int i = 0; i < batch_n; i++) {
        struct source *source = batch[i].data.ptr;
        if (source)
            source->ready(source, batch[i].events);
    }
    batch_n = 0;
}

bool source_open(struct source *source, int fd, uint32_t events,
                 void (*ready)(struct source *, uint32_t))
{
    *source = (struct source){ .fd = fd, .events = 0, .ready = ready };
    if (!events)
        return true;
    struct epoll_event event = { .events = events, .data.ptr = source };
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) < 0) {
        source->fd = -1;
        return false;
    }
    source->events = events;
    return true;
}

void source_watch(struct source *source, uint32_t events)
{
    if (source->fd < 0 || source->events == events)
        return;
    struct epoll_event event = { .events = events, .data.ptr = source };
    int op = !source->events ? EPOLL_CTL_ADD : !events ? EPOLL_CTL_DEL : EPOLL_CTL_MOD;
    if (epoll_ctl(epoll_fd, op, source->fd, &event) == 0)
        source->events = events;
    if (!events)
        forget_pending(source);
}

int source_release(struct source *source)
{
    int fd = source->fd;
    source_watch(source, 0);
    forget_pending(source);
    source->fd = -1;
    return fd;
}

void source_close(struct source *source)
{
    if (source->fd >= 0)
        close(source_release(source));
}

/* Not through the vDSO: finding it costs two page faults at the start, more than the few readings of
 * a sandbox that lives for one command. */
static void kernel_time(clockid_t clock, struct timespec *t)
{
    syscall(SYS_clock_gettime, clock, t);
}

static uint64_t kernel_us(void)
{
    struct timespec t;
    kernel_time(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

uint64_t now_us(void)
{
    return (stopped_us ? stopped_us : kernel_us()) - stood_us;
}

void clock_stop(void)
{
    if (!stopped_us)
        stopped_us = kernel_us();
}

void clock_go(void)
{
    if (stopped_us)
        stood_us += kernel_us() - stopped_us;
    stopped_us = 0;
}

double now_wall(void)
{
    struct timespec t;
    kernel_time(CLOCK_REALTIME, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

void *map_alloc(size_t n)
{
    void *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

bool tables_open(void)
{
    tables = map_alloc(TABLE_BYTES);
    return tables && madvise(tables, TABLE_BYTES, MADV_DONTFORK) == 0;
}

void *table_alloc(size_t n)
{
    n = (n + 63) & ~(size_t)63;
    if (n > TABLE_BYTES - tables_used)
        return NULL;
    tables_used += n;
    return tables + tables_used - n;
}

void *map_resize(void *old, size_t old_n, size_t new_n)
{
    if (!old)
        return map_alloc(new_n);
    void *p = mremap(old, old_n, new_n, MREMAP_MAYMOVE);
    return p == MAP_FAILED ? NULL : p;
}

void map_free(void *p, size_t n)
{
    if (p)
        munmap(p, n);
}
