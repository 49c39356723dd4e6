#include "process.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cgroup.h"
#include "config.h"
#include "job.h"
#include "leaver.h"
#include "loop.h"
#include "root.h"
#include "session.h"
#include "transfer.h"
#include "vm.h"

#define REAP_BATCH 64

bool namespace_given[5];
int null_fd = -1;
static int oom_fd = -1, oom_standing; /* init's own score, as the spawner left it */
static struct source children;

static void child_ended(pid_t pid, int status)
{
    vm_watch_check(); /* whatever its status: a shell may have hidden that of what was killed */
    if (!jobs_reap(pid, status) && !sessions_reap(pid, status) && !transfers_reap(pid) &&
        !root_reap(pid))
        leaver_reap(pid);
}

/* Root inside may signal a child of ours from the moment it is in the user namespace. Stopped before
 * its exec, or while it works on files, it would hold its call for ever. A command that is stopped
 * stays stopped: that is job control. */
static void child_stopped(pid_t pid)
{
    if (!jobs_stopped(pid) && !sessions_stopped(pid) && !transfers_stopped(pid))
        leaver_stopped(pid); /* else it is an orphan of some command */
}

/* True: there may be more to reap. */
static bool reap(void)
{
    pid_t pid;
    bool any = false;
    int taken = 0, status;
    while (taken < REAP_BATCH && (pid = waitpid(-1, &status, WNOHANG | WUNTRACED)) > 0) {
        taken++;
        if (WIFSTOPPED(status)) {
            child_stopped(pid);
            continue;
        }
        any = true;
        child_ended(pid, status);
    }
    if (any)
        cgroups_sweep();
    return taken == REAP_BATCH;
}

static void children_ready(struct source *source, uint32_t events)
{
    struct signalfd_siginfo pending[8];
    (void)events;
    if (read(source->fd, pending, sizeof pending) < 0 && errno != EAGAIN)
        return;
    /* The rest in the next round: where children end faster than they are reaped, a round would go on
     * for ever, and neither a timeout nor a kill would be seen. */
    if (reap())
        kill(getpid(), SIGCHLD);
}

bool process_alone(void)
{
    siginfo_t child;
    reap();
    return waitid(P_ALL, 0, &child, WEXITED | WNOHANG | WNOWAIT | __WALL) < 0 && errno == ECHILD;
}

static void adopt_descriptors(void)
{
    if (vm_state != VM_NONE)
        return; /* their places are reserved until vm.begin */
    for (int fd = FD_LISTEN; fd < FD_FIRST_FREE; fd++) {
        bool given = fcntl(fd, F_SETFD, FD_CLOEXEC) == 0;
        if (fd == FD_SPOOL)
            config.has_spool = given;
        if (fd == FD_CGROUP)
            config.has_cgroup = given;
        if (fd == FD_UPPER)
            config.has_upper = given;
        if (fd == FD_SHELL)
            config.has_shell = given;
        if (fd >= FD_USERNS && fd <= FD_CGROUPNS)
            namespace_given[fd - FD_USERNS] = given;
    }
}

/* Before we stop being dumpable: the file is then the host's root's. */
static void oom_score_open(void)
{
    char text[16];
    int fd = open("/proc/self/oom_score_adj", O_RDWR | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (n > 0) {
        text[n] = 0;
        oom_standing = atoi(text);
    }
    if (n > 0 && oom_standing != config.oom_score_adj)
        oom_fd = fd;
    else if (fd >= 0)
        close(fd);
}

const char *process_open(void)
{
    struct rlimit files;
    sigset_t mask;
    adopt_descriptors();
    oom_score_open();
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); /* for a run that is not PID 1 */
    prctl(PR_SET_NAME, "dsec-init", 0, 0, 0);
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null_fd < 0)
        return "/dev/null cannot be opened";
    signal(SIGPIPE, SIG_IGN);
    sigfillset(&mask); /* nothing interrupts init; SIGCHLD comes through the descriptor */
    sigprocmask(SIG_SETMASK, &mask, NULL);
    sigemptyset(&mask);
    sigaddset(&mask, SIGCHLD);
    int fd = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK);
    if (fd < 0 || !source_open(&children, fd, EPOLLIN, children_ready))
        return "signalfd failed";
    return NULL;
}

void oom_score_raise(bool raised)
{
    char text[16];
    if (oom_fd < 0)
        return;
    int n = snprintf(text, sizeof text, "%d", raised ? config.oom_score_adj : oom_standing);
    if (pwrite(oom_fd, text, (size_t)n, 0) < 0 && raised) {
        close(oom_fd); /* refused once, refused always: lowering needs CAP_SYS_RESOURCE */
        oom_fd = -1;
    }
}

bool disk_is_full(void)
{
    struct statvfs fs;
    /* Our own root is that of the first upper for ever; the upper may be another one by now. */
    if ((config.has_upper ? fstatvfs(FD_UPPER, &fs) : statvfs("/", &fs)) < 0)
        return false;
    /* Writers see ENOSPC a few blocks before zero where the file system reserves for metadata. */
    return (fs.f_blocks && fs.f_bavail < 16) || (fs.f_files && fs.f_favail == 0);
}

/* Parent and session of a process by /proc/<pid>/stat; false when it is gone. */
static bool read_stat(int proc, const char *pid, pid_t *parent, pid_t *session)
{
    char path[32], text[512];
    snprintf(path, sizeof path, "%.16s/stat", pid);
    int fd = openat(proc, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0)
        return false;
    text[n] = 0;
    char *after = strrchr(text, ')'); /* the name before may hold anything */
    int group;
    return after && sscanf(after, ") %*c %d %d %d", parent, &group, session) == 3;
}

struct entry {
    pid_t pid, parent, session;
    bool doomed;
};

#define ENTRIES 8192

static int read_processes(struct entry *entries)
{
    DIR *dir = opendir("/proc");
    int n = 0;
    if (!dir)
        return 0;
    for (struct dirent *d; n < ENTRIES && (d = readdir(dir));) {
        struct entry *e = &entries[n];
        e->pid = atoi(d->d_name);
        e->doomed = false;
        if (e->pid > 0 && read_stat(dirfd(dir), d->d_name, &e->parent, &e->session))
            n++;
    }
    closedir(dir);
    return n;
}

void tree_kill(pid_t root)
{
    struct entry *entries = map_alloc(ENTRIES * sizeof *entries);
    for (int round = 0, killed = 1; entries && killed && round < 10; round++) {
        int n = read_processes(entries);
        killed = 0;
        for (int again = 1; again;) {
            again = 0;
            for (int i = 0; i < n; i++) {
                struct entry *e = &entries[i];
                bool below = e->pid == root || e->session == root;
                for (int k = 0; k < n && !below; k++)
                    below = entries[k].doomed && entries[k].pid == e->parent;
                if (below && !e->doomed && e->pid != getpid())
                    e->doomed = true, again = 1;
            }
        }
        for (int i = 0; i < n; i++)
            if (entries[i].doomed && entries[i].pid != root)
                killed += kill(entries[i].pid, SIGKILL) == 0;
        kill(root, SIGKILL);
    }
    map_free(entries, ENTRIES * sizeof *entries);
}
