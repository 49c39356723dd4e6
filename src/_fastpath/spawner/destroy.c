#include "spawner/destroy.h"

#include <poll.h>
#include <signal.h>
#include <stdio.h>

#include "native/kernel.h"
#include "native/steps.h"
#include "native/tree.h"

#define NETNS_LOOKS 8 /* RETRY_MS apart */

static int kill_cgroup(const struct host *host, const char *path)
{
    char file[4096];

    if ((size_t)snprintf(file, sizeof file, "%s/cgroup.kill", path) >= sizeof file)
        return -ENAMETOOLONG;
    int error = host_write(host, file, "1");
    /* A group that is gone, or goes meanwhile, has no process. */
    return error == -ENODEV || error == -ENOENT ? 0 : error;
}

int begin_destroy(struct destruction *d, const struct host *host)
{
    d->step = "kill";
    d->clean = false;
    d->deadline_ns = now_ns() + (uint64_t)d->plan.timeout_ms * 1000000u;
    int error = *d->plan.cgroup ? kill_cgroup(host, d->plan.cgroup) : 0;
    if (error == 0 && d->pidfd >= 0 &&
        syscall(SYS_pidfd_send_signal, d->pidfd, SIGKILL, NULL, 0) < 0 && errno != ESRCH)
        error = -errno;
    return error;
}

static int remove_group(const struct host *host, const char *path)
{
    const char *name;
    int parent = host_parent(host, path, &name);
    if (parent < 0)
        return parent == -ENOENT ? 0 : parent;
    int error = remove_cgroup(parent, name);
    close(parent);
    return error;
}

static int remove_rest(struct destruction *d, const struct host *host)
{
    d->step = "runtime_dir";
    int error = host_remove(host, d->plan.runtime_dir);
    if (error == 0) {
        d->step = "upper";
        error = host_remove(host, d->plan.upper_dir);
    }
    return error;
}

/* The last socket of a dead process is counted until an RCU grace period has passed: look again. */
static int inspect_network(struct destruction *d, const struct host *host)
{
    d->clean = host_netns_reusable(host, d->netns);
    return d->clean || ++d->looks == NETNS_LOOKS ? 0 : -EAGAIN;
}

int finish_destroy(struct destruction *d, const struct host *host)
{
    bool late = now_ns() > d->deadline_ns;

    if (d->pidfd >= 0) {
        struct pollfd entry = { .fd = d->pidfd, .events = POLLIN };
        d->step = "death";
        if (poll(&entry, 1, 0) == 0)
            return late ? -ETIMEDOUT : -EAGAIN;
        close_if(&d->pidfd);
    }
    if (*d->plan.cgroup) {
        d->step = "cgroup";
        int error = remove_group(host, d->plan.cgroup);
        if (error == -EBUSY)
            return late ? -ETIMEDOUT : -EAGAIN; /* a dying process still counts for a moment */
        if (error < 0)
            return error;
    }
    int error = remove_rest(d, host);
    if (error == 0 && d->netns >= 0)
        error = inspect_network(d, host);
    return error;
}
