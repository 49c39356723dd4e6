#include "leaver.h"

#include <signal.h>

#include "limits.h"
#include "loop.h"

static struct leaver {
    pid_t pid;
    uint64_t kill_us; /* 0: killed */
} *leavers;
static unsigned n_leavers;

bool leaver_table_open(void)
{
    leavers = table_alloc(MAX_TRANSFERS * sizeof *leavers);
    return leavers != NULL;
}

void leaver_add(pid_t pid)
{
    if (pid > 0 && n_leavers == MAX_TRANSFERS)
        kill(pid, SIGKILL);
    else if (pid > 0)
        leavers[n_leavers++] = (struct leaver){ pid, now_us() + LEAVE_US };
}

static struct leaver *find(pid_t pid)
{
    for (struct leaver *leaver = leavers; leaver < leavers + n_leavers; leaver++)
        if (leaver->pid == pid)
            return leaver;
    return NULL;
}

bool leaver_reap(pid_t pid)
{
    struct leaver *leaver = find(pid);
    if (leaver)
        *leaver = leavers[--n_leavers];
    return leaver != NULL;
}

bool leaver_stopped(pid_t pid)
{
    return find(pid) && kill(pid, SIGKILL) == 0;
}

uint64_t leavers_tick(uint64_t now)
{
    uint64_t due = 0;
    for (struct leaver *leaver = leavers; leaver < leavers + n_leavers; leaver++) {
        if (leaver->kill_us && now >= leaver->kill_us) {
            kill(leaver->pid, SIGKILL);
            leaver->kill_us = 0;
        }
        if (leaver->kill_us && (!due || leaver->kill_us < due))
            due = leaver->kill_us;
    }
    return due;
}
