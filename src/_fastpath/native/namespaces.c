#include "native/namespaces.h"

#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "native/kernel.h"
#include "native/process.h"

/* --- user namespaces ------------------------------------------------------------------------- */

/* It shares the descriptors of the caller: outliving it, it would hold the caller's locks and sockets. */
static int wait_for_kill(void *caller)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    if (syscall(SYS_getppid) != *(pid_t *)caller)
        return 0; /* killed before we asked */
    for (;;)
        syscall(SYS_ppoll, NULL, 0, NULL, NULL, 8);
    return 0;
}

static int write_map(pid_t pid, const char *file, uint32_t first, uint32_t base, uint32_t count)
{
    char path[64], line[64];
    snprintf(path, sizeof path, "/proc/%d/%s", pid, file);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    int size = snprintf(line, sizeof line, "%u %u %u\n", first, base, count);
    int error = write(fd, line, (size_t)size) == size ? 0 : -errno;
    close(fd);
    return error;
}

/* The kernel makes the effective uid of the creator the owner of a user namespace. Raw calls change
 * the credentials of this thread only; the permitted set survives because the real uid stays 0. */
static pid_t spawn_as_owner(uint32_t owner, void *stack, pid_t *caller, const char **step)
{
    struct spawn spawn = { .flags = CLONE_NEWUSER | CLONE_FILES,
                           .stack = stack,
                           .run = wait_for_kill,
                           .argument = caller };
    sigset_t all, before;

    sigfillset(&all);
    syscall(SYS_rt_sigprocmask, SIG_BLOCK, &all, &before, 8); /* the child inherits: no handler */
    *step = "become_owner";
    long result = KERNEL(syscall(SYS_setresuid, -1, owner, -1));
    if (result == 0) {
        *step = "clone_userns";
        result = spawn_child(&spawn);
        if (KERNEL(syscall(SYS_setresuid, -1, 0, -1)) < 0)
            abort(); /* cannot happen: the real uid is 0; going on as `owner` would be wrong */
    }
    syscall(SYS_rt_sigprocmask, SIG_SETMASK, &before, NULL, 8);
    return (pid_t)result;
}

static int make_mapped(uint32_t first, uint32_t base, uint32_t count, uint32_t owner,
                       const char **step)
{
    char path[64];
    int dumpable = prctl(PR_GET_DUMPABLE);

    *step = "stack";
    void *stack = make_stack();
    if (!stack)
        return -ENOMEM;
    pid_t caller = getpid(), pid = spawn_as_owner(owner, stack, &caller, step);
    if (dumpable == 1)
        prctl(PR_SET_DUMPABLE, 1); /* a change of credentials clears it for the whole process */
    if (pid < 0) {
        free_stack(stack);
        return pid;
    }
    *step = "uid_map";
    int fd = write_map(pid, "uid_map", first, base, count);
    if (fd == 0) {
        *step = "gid_map";
        fd = write_map(pid, "gid_map", first, base, count);
    }
    if (fd == 0) {
        *step = "open_userns";
        snprintf(path, sizeof path, "/proc/%d/ns/user", pid);
        fd = (int)KERNEL(open(path, O_RDONLY | O_CLOEXEC));
    }
    kill(pid, SIGKILL);
    while (waitpid(pid, NULL, __WCLONE) < 0 && errno == EINTR)
        ;
    free_stack(stack); /* only now: the child stood on it */
    return fd;
}

int make_userns(uint32_t base, uint32_t count, uint32_t owner, const char **step)
{
    return make_mapped(0, base, count, owner, step);
}

int make_shift_userns(uint32_t from, uint32_t to, uint32_t count, const char **step)
{
    return make_mapped(from, to, count, 0, step);
}

/* --- network namespaces ---------------------------------------------------------------------- */

struct netns_work {
    int fd;
    const char *step;
};

static int raise_loopback(void)
{
    struct ifreq request = { .ifr_name = "lo", .ifr_flags = IFF_UP | IFF_LOOPBACK | IFF_RUNNING };
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -errno;
    int error = ioctl(fd, SIOCSIFFLAGS, &request) < 0 ? -errno : 0;
    close(fd);
    return error;
}

/* ping(8) without privilege; a kernel without the setting only loses ping. */
static void allow_ping(void)
{
    static const char range[] = "0 2147483647";
    int fd = open("/proc/sys/net/ipv4/ping_group_range", O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    if (write(fd, range, sizeof range - 1) < 0)
        errno = 0;
    close(fd);
}

static int set_up_netns(void *argument)
{
    struct netns_work *work = argument;

    work->step = "loopback";
    int error = raise_loopback();
    if (error) {
        work->fd = error;
        return 1;
    }
    allow_ping();
    work->step = "open_netns";
    work->fd = (int)KERNEL(open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC));
    return work->fd < 0;
}

int make_netns(const char **step)
{
    struct netns_work work = { .fd = -EIO, .step = "clone_netns" };
    int status = run_in_child(CLONE_NEWNET | CLONE_FILES, set_up_netns, &work);
    *step = work.step;
    return status < 0 ? status : work.fd;
}

/* Read the file `name` of our network namespace whole. Returns its size or a negative errno. */
static int read_net(int net, const char *name, char *buffer, size_t room)
{
    size_t size = 0;
    ssize_t got;

    int fd = openat(net, name, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    while (size < room - 1 && (got = read(fd, buffer + size, room - 1 - size)) > 0)
        size += (size_t)got;
    close(fd);
    buffer[size] = 0;
    return (int)size;
}

static int lines_without(const char *text, const char *word)
{
    int lines = 0;
    while (*text) {
        const char *end = strchrnul(text, '\n');
        const char *hit = strstr(text, word);
        lines += !hit || hit > end;
        text = *end ? end + 1 : end;
    }
    return lines;
}

static long number_after(const char *text, const char *label)
{
    const char *at = strstr(text, label);
    return at ? strtol(at + strlen(label), NULL, 10) : -1;
}

/* `used` and `tw` of sockstat are per namespace, and no socket of ours is open in it yet. */
static int holds_sockets(int net, char *buffer, size_t room)
{
    int size = read_net(net, "sockstat", buffer, room);
    return size <= 0 || number_after(buffer, "used ") != 0 || number_after(buffer, " tw ") != 0;
}

static int holds_interfaces(int net, char *buffer, size_t room)
{
    if (read_net(net, "dev", buffer, room) <= 0 || lines_without(buffer, " lo:") != 2)
        return 1; /* two heading lines */
    if (read_net(net, "route", buffer, room) > 0 && lines_without(buffer, "Destination") != 0)
        return 1;
    if (read_net(net, "if_inet6", buffer, room) > 0 && lines_without(buffer, " lo\n") != 0)
        return 1;
    return 0;
}

int own_netns_reusable(int net)
{
    char buffer[4096];
    return !holds_sockets(net, buffer, sizeof buffer) &&
           !holds_interfaces(net, buffer, sizeof buffer);
}

static int inspect_netns(void *argument)
{
    struct netns_work *work = argument;

    int net = open("/proc/thread-self/net", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (net < 0)
        return 2;
    int status = setns(work->fd, CLONE_NEWNET) < 0 ? 2 : !own_netns_reusable(net);
    close(net); /* the table of descriptors is shared with the caller */
    return status;
}

int netns_reusable(int netns)
{
    struct netns_work work = { .fd = netns };
    int status = run_in_child(CLONE_FILES, inspect_netns, &work);
    if (status < 0)
        return status;
    return status == 2 ? -EINVAL : status == 0;
}
