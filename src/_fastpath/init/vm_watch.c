/* Out-of-memory kills in the machine, told to the host. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "config.h"
#include "vm.h"

#define VMSTAT_BYTES 16384

static int vmstat_fd = -1; /* kept: root inside may mount anything over /proc */
static struct source events;
static struct call *watcher; /* NULL: none */
static uint64_t sent; /* to it */

int vm_kills_open(void)
{
    vmstat_fd = open("/proc/vmstat", O_RDONLY | O_CLOEXEC);
    return vmstat_fd < 0 ? -errno : 0;
}

/* Guest-wide, since boot: also of what is in no memory cgroup of ours. */
static uint64_t kills(void)
{
    static char text[VMSTAT_BYTES];
    size_t n = 0;
    ssize_t got;
    while (n < sizeof text - 1 &&
           (got = pread(vmstat_fd, text + n, sizeof text - 1 - n, (off_t)n)) > 0)
        n += (size_t)got;
    text[n] = 0;
    const char *line = strstr(text, "\noom_kill ");
    return line ? strtoull(line + strlen("\noom_kill "), NULL, 10) : 0;
}

static void send_count(struct call *call, uint64_t count)
{
    uint8_t room[32];
    struct mp_writer w = mp_writer_of(room, sizeof room);
    mp_put_map(&w, 1);
    mp_put_text(&w, "oom_kills");
    mp_put_u64(&w, count);
    sent = count;
    item_send_raw(call, room, mp_written(&w));
}

void vm_watch_check(void)
{
    if (!watcher || !watcher->credit)
        return;
    uint64_t count = kills();
    if (count != sent)
        send_count(watcher, count);
}

/* A change of memory.events is reported until it is read. */
static void events_ready(struct source *source, uint32_t ready)
{
    char text[256];
    (void)ready;
    if (pread(source->fd, text, sizeof text, 0) < 0)
        source_close(source);
    vm_watch_check();
}

int vm_kills_follow(void)
{
    int fd = openat(FD_CGROUP, "memory.events", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    if (source_open(&events, fd, EPOLLPRI, events_ready))
        return 0;
    close(fd);
    return -ENOSPC;
}

static void pump(struct call *call)
{
    (void)call;
    vm_watch_check();
}

static void cancel(struct call *call)
{
    watcher = NULL;
    reply_nil(call);
}

static void drop(struct call *call)
{
    (void)call;
    watcher = NULL;
}

void vm_watch(struct call *call, struct mp_bytes raw)
{
    static const struct call_ops watch_ops = { .pump = pump, .cancel = cancel, .drop = drop };
    const char *problem = args_nothing(raw);
    if (problem) {
        call_fail(call, "invalid_argument", "%s", problem);
    } else if (watcher) {
        call_fail(call, "already_exists", "the machine is watched by another call");
    } else {
        call->ops = &watch_ops;
        watcher = call;
        send_count(call, kills());
    }
}
