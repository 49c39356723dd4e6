#include "cgroup.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "config.h"
#include "limits.h"
#include "loop.h"

enum state { UNUSED, FREE, TAKEN, LINGERING };

static struct slot {
    int dir, events; /* events: -1 until it is read first */
    unsigned name;
    enum state state;
    bool killed; /* never used again: see retire */
} *slots;
static int slots_high;
static unsigned next_name, lingering;

/* A directory once killed is removed. Linux (6.14 and later) compares the kill count of the parent's
 * own cgroup with that of the target after CLONE_INTO_CGROUP, takes the difference for a kill that
 * raced with the fork, and kills the newborn. */
static void retire(struct slot *slot)
{
    char name[16];
    snprintf(name, sizeof name, "%u", slot->name);
    if (unlinkat(FD_CGROUP, name, AT_REMOVEDIR) < 0 && errno != ENOENT)
        return; /* tried again by the next sweep */
    close(slot->dir);
    if (slot->events >= 0)
        close(slot->events);
    slot->state = UNUSED;
}

static int slot_make(struct slot *slot)
{
    char name[16];
    do
        snprintf(name, sizeof name, "%u", next_name++);
    while (mkdirat(FD_CGROUP, name, 0755) < 0 && errno == EEXIST && next_name < 1u << 20);
    int dir = openat(FD_CGROUP, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir < 0) {
        unlinkat(FD_CGROUP, name, AT_REMOVEDIR);
        return CGROUP_FULL;
    }
    *slot = (struct slot){ dir, -1, next_name - 1, TAKEN, false };
    return (int)(slot - slots);
}

bool cgroup_table_open(void)
{
    slots = table_alloc(MAX_CGROUPS * sizeof *slots);
    return slots != NULL;
}

int cgroup_acquire(void)
{
    if (!config.has_cgroup)
        return NO_CGROUP;
    for (int again = 0; again < 2; again++) {
        for (int i = 0; i < slots_high; i++)
            if (slots[i].state == FREE) {
                slots[i].state = TAKEN;
                return i;
            }
        if (!lingering)
            break;
        cgroups_sweep();
    }
    int unused = 0;
    while (unused < slots_high && slots[unused].state != UNUSED)
        unused++;
    if (unused == MAX_CGROUPS)
        return CGROUP_FULL;
    int slot = slot_make(&slots[unused]);
    if (slot == slots_high)
        slots_high++;
    return slot;
}

int cgroup_fd(int slot)
{
    return slot >= 0 ? slots[slot].dir : -1;
}

static bool is_empty(struct slot *slot)
{
    char text[128];
    siginfo_t child;
    /* Orphans become init's children: without any child there is nobody left anywhere. */
    if (waitid(P_ALL, 0, &child, WEXITED | WNOHANG | WNOWAIT | __WALL) < 0 && errno == ECHILD)
        return true;
    if (slot->events < 0)
        slot->events = openat(slot->dir, "cgroup.events", O_RDONLY | O_CLOEXEC);
    ssize_t n = pread(slot->events, text, sizeof text - 1, 0);
    if (n < 0)
        return false;
    text[n] = 0;
    return strstr(text, "populated 0") != NULL;
}

void cgroup_kill(int slot)
{
    int fd = slot < 0 ? -1 : openat(slots[slot].dir, "cgroup.kill", O_WRONLY | O_CLOEXEC);
    if (fd < 0) {
        cgroup_kill_others(slot, 0); /* before Linux 5.14 */
        return;
    }
    if (write(fd, "1", 1) < 0)
        cgroup_kill_others(slot, 0);
    close(fd);
    slots[slot].killed = true;
}

int cgroup_signal_others(int slot, pid_t spared, int signal)
{
    char text[2048];
    int fd = slot < 0 ? -1 : openat(slots[slot].dir, "cgroup.procs", O_RDONLY | O_CLOEXEC);
    int hit = 0;
    pid_t pid = 0;
    ssize_t n;
    while (fd >= 0 && (n = read(fd, text, sizeof text)) > 0)
        for (ssize_t i = 0; i < n; i++) {
            if (text[i] >= '0' && text[i] <= '9') {
                pid = pid * 10 + (text[i] - '0');
                continue;
            }
            /* 0 is a process of another PID namespace: never "our group" for kill(2). */
            if (pid > 1 && pid != spared && pid != getpid())
                hit += kill(pid, signal) == 0;
            pid = 0;
        }
    if (fd >= 0)
        close(fd);
    return hit;
}

int cgroup_kill_others(int slot, pid_t spared)
{
    return cgroup_signal_others(slot, spared, SIGKILL);
}

/* Back to the pool, gone, or waiting for its last process. */
static void settle(struct slot *slot, bool empty)
{
    bool waiting = slot->state == LINGERING;
    slot->state = LINGERING;
    if (empty) {
        if (slot->killed)
            retire(slot);
        else
            slot->state = FREE;
    }
    lingering += (unsigned)(slot->state == LINGERING) - (unsigned)waiting;
}

void cgroup_release(int slot)
{
    if (slot >= 0)
        settle(&slots[slot], is_empty(&slots[slot]));
}

bool cgroup_release_empty(int slot)
{
    if (slot < 0 || !is_empty(&slots[slot]))
        return false;
    settle(&slots[slot], true);
    return true;
}

void cgroups_sweep(void)
{
    for (int i = 0; lingering && i < slots_high; i++)
        if (slots[i].state == LINGERING)
            settle(&slots[i], is_empty(&slots[i]));
}
