/* The steps of vm.begin and vm.renew, in their order. */
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "config.h"
#include "vm.h"

#define CGROUP "/sys/fs/cgroup/dsec"
#define MIN_TTL "/sys/kernel/mm/lru_gen/min_ttl_ms"

int vm_write_text(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    int error = write(fd, text, strlen(text)) < 0 ? -errno : 0;
    close(fd);
    return error;
}

/* The cgroup of all commands; PID 1 stays in the root of the tree. */
static int make_cgroup(uint64_t pids)
{
    char limit[32];
    snprintf(limit, sizeof limit, "%llu", (unsigned long long)pids);
    int error = vm_write_text("/sys/fs/cgroup/cgroup.subtree_control", "+memory +pids +cpu");
    if (!error && mkdir(CGROUP, 0755) < 0)
        error = -errno;
    if (!error)
        error = vm_write_text(CGROUP "/pids.max", limit);
    if (error)
        return error;
    int fd = open(CGROUP, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return vm_place(fd < 0 ? -errno : fd, FD_CGROUP);
}

static int set_hostname(struct mp_bytes name)
{
    return sethostname((const char *)name.p, name.n) < 0 ? -errno : 0;
}

/* What was used in the last second stays in memory, and where that cannot be the kernel kills. Without it a
 * machine that has no swap reads its programs from its disks again and again, for minutes, before it does.
 * The kernel that a user gives may not know of it. */
static int keep_working_set(void)
{
    int error = vm_write_text(MIN_TTL, "1000");
    return error == -ENOENT ? 0 : error;
}

int vm_build(struct vm_build *build, const struct vm_args *args)
{
    struct steps *s = &build->steps;
    STEP(s, "time", vm_time_set(args->time_ns.value)); /* first: files that are made get theirs from it */
    STEP(s, "entropy", vm_entropy_add(args->entropy));
    int error = vm_service ? 0 : vm_root_assemble(build, args);
    if (error)
        return error;
    STEP(s, "spool", vm_service ? vm_spool_open() : 0);
    STEP(s, "files", vm_files_write(build, args));
    STEP(s, "hostname", set_hostname(args->hostname));
    STEP(s, "cgroup", vm_service ? vm_cgroup_make(args->pids.value) : make_cgroup(args->pids.value));
    STEP(s, "oom_kills", vm_kills_follow());
    STEP(s, "working_set", keep_working_set());
    STEP(s, "loopback", vm_service ? 0 : vm_loopback_up());
    STEP(s, "network", args->network.interface[0] ? vm_network_up(&args->network) : 0);
    STEP(s, "reclaim", args->min_age_s ? vm_reclaim_start(args->min_age_s, args->swap_bytes) : 0);
    config.has_cgroup = config.has_spool = true;
    config.has_upper = config.has_shell = !vm_service;
    return enter_step(s, "");
}

int vm_build_again(struct vm_build *build, const struct vm_args *args)
{
    struct steps *s = &build->steps;
    STEP(s, "time", vm_time_set(args->time_ns.value));
    STEP(s, "entropy", vm_entropy_add(args->entropy));
    STEP(s, "files", vm_files_write(build, args));
    STEP(s, "hostname", set_hostname(args->hostname));
    STEP(s, "network", args->network.interface[0] ? vm_network_up(&args->network) : 0);
    return enter_step(s, "");
}
