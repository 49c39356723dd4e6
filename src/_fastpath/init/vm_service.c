/* A machine that has a root and a PID 1 of its own, in which we are a service. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "config.h"
#include "vm.h"

#define SPOOL "/var/lib/dsec"
#define CGROUPS "/sys/fs/cgroup"

static int open_directory(const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    return fd < 0 ? -errno : fd;
}

/* What a service before us left there has no reader any more, but only its root could see it. */
int vm_spool_open(void)
{
    if (mkdir(SPOOL, 0700) < 0 && errno != EEXIST)
        return -errno;
    return vm_place(open_directory(SPOOL), FD_SPOOL);
}

/* The cgroup that PID 1 made for us, and left to us ("Delegate" of systemd.resource-control(5)). */
static int find_cgroup(char *path, size_t room)
{
    char text[MAX_PATH];
    int fd = open("/proc/self/cgroup", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    int error = n < 0 ? -errno : 0;
    if (fd >= 0)
        close(fd);
    if (error)
        return error;
    text[n] = 0;
    char *own = strstr(text, "0::/"), *end = own ? strchr(own, '\n') : NULL;
    if (!end) /* the system has cgroups of version 1 only */
        return -EOPNOTSUPP;
    *end = 0;
    return snprintf(path, room, CGROUPS "%s", own + 3) < (int)room ? 0 : -ENAMETOOLONG;
}

static int make_below(const char *parent, const char *name, char *path, size_t room)
{
    if (snprintf(path, room, "%s/%s", parent, name) >= (int)room)
        return -ENAMETOOLONG;
    return mkdir(path, 0755) < 0 && errno != EEXIST ? -errno : 0;
}

/* A cgroup with controllers for those below it holds no process itself: we move into one, the commands'
 * is another. */
int vm_cgroup_make(uint64_t pids)
{
    char own[MAX_PATH], path[MAX_PATH + 32], file[MAX_PATH + 64], number[32];
    int error = find_cgroup(own, sizeof own);
    if (!error)
        error = make_below(own, "agent", path, sizeof path);
    snprintf(file, sizeof file, "%s/cgroup.procs", path);
    snprintf(number, sizeof number, "%d", (int)getpid());
    if (!error)
        error = vm_write_text(file, number);
    snprintf(file, sizeof file, "%s/cgroup.subtree_control", own);
    if (!error)
        error = vm_write_text(file, "+memory +pids");
    if (!error)
        error = make_below(own, "commands", path, sizeof path);
    snprintf(file, sizeof file, "%s/pids.max", path);
    snprintf(number, sizeof number, "%llu", (unsigned long long)pids);
    if (!error)
        error = vm_write_text(file, number);
    return error ? error : vm_place(open_directory(path), FD_CGROUP);
}
