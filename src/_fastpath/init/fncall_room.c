/* The keeper's zygote and rooms (fncall.h). */
#include "fncall.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "confine.h"

#ifndef SYS_mount_setattr
#define SYS_mount_setattr 442
#endif

#define CALL_UID 65534
#define WORK "/tmp/work"
#define TAIL 180 /* bytes of what the zygote or a call wrote last */
#define ROOM_FDS 4
#define MAX_FDS (ROOM_FDS + 2) /* the work directory is not for the call, but three others are */
#define ROOM (CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | SIGCHLD)

static const char *const room_files[ROOM_FDS] = { "/proc/self/ns/pid", "/proc/self/ns/mnt",
                                                  "/proc/self/ns/ipc", WORK };
static uint8_t message[REPORT_MAX]; /* the last one of a child */

static void pair_make(int pair[2], int kind)
{
    if (socketpair(AF_UNIX, kind | SOCK_CLOEXEC, 0, pair) < 0)
        child_fail(EXHAUSTED, "no descriptor left: %s", strerror(errno));
}

/* --- network ------------------------------------------------------------------------------------- */

/* Of processes that are gone, too: TIME_WAIT and the like. */
static unsigned sockets_count(void)
{
    static const char *const tables[] = { "tcp", "tcp6", "udp", "udp6", "udplite", "udplite6", "raw",
                                          "raw6", "icmp", "icmp6" };
    static char text[16 << 10];
    unsigned count = 0;
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
        char path[32];
        snprintf(path, sizeof path, "/proc/net/%s", tables[i]);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        ssize_t n;
        while (fd >= 0 && (n = read(fd, text, sizeof text)) > 0)
            for (char *p = text; (p = memchr(p, '\n', (size_t)(text + n - p))); p++)
                count++;
        if (fd >= 0)
            close(fd);
    }
    return count;
}

bool network_clean(const struct keeper *keeper)
{
    return !keeper->network || sockets_count() <= keeper->sockets;
}

/* --- what cannot be written ---------------------------------------------------------------------- */

static void make_read_only(void)
{
    struct {
        uint64_t set, clear, propagation, userns;
    } how = { .set = 0x1 | 0x2 /* MOUNT_ATTR_RDONLY | NOSUID */, .propagation = MS_PRIVATE };
    if (unshare(CLONE_NEWNS) < 0 ||
        syscall(SYS_mount_setattr, -1, "/", 0x8000 /* AT_RECURSIVE */, &how, sizeof how) < 0)
        child_fail(UNSUPPORTED, "the policy must allow mounts, to make files read-only: %s",
                   strerror(errno));
}

/* --- zygote -------------------------------------------------------------------------------------- */

static void install_filter(struct mp_bytes filter)
{
    struct {
        unsigned short len;
        void *filter;
    } program = { (unsigned short)(filter.n / 8), (void *)(uintptr_t)filter.p };
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 ||
        (program.len && prctl(PR_SET_SECCOMP, 2 /* SECCOMP_MODE_FILTER */, &program, 0, 0) < 0))
        child_fail(INTERNAL, "cannot install the filter of calls: %s", strerror(errno));
}

static _Noreturn void become_zygote(const struct fncall_args *args, const struct identity *who, int ctl,
                                    int log)
{
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    if (dup2(log, 1) < 0 || dup2(log, 2) < 0 || dup2(ctl, CTL_FD) < 0)
        child_fail(INTERNAL, "cannot place descriptors: %s", strerror(errno));
    syscall(SYS_close_range, CTL_FD + 1, ~0U, 0);
    apparmor_open(false);
    install_filter(args->filter);
    confine_files();
    struct exec_args program = { .argv = args->argv, .env = args->env };
    exec_program(&program, who, false);
}

/* Its last words, without what would break a line. */
static const char *tail_of(int fd, char text[TAIL + 1])
{
    off_t size = lseek(fd, 0, SEEK_END);
    ssize_t n = pread(fd, text, TAIL, size > TAIL ? size - TAIL : 0);
    text[n > 0 ? n : 0] = 0;
    for (char *p = text; *p; p++)
        if ((unsigned char)*p < ' ')
            *p = ' ';
    return text;
}

static _Noreturn void zygote_failed(const struct keeper *keeper)
{
    char text[TAIL + 1];
    child_fail(UNSUPPORTED, "the pool's Python ended: %s", tail_of(keeper->log, text));
}

void keeper_open(struct keeper *keeper, const struct fncall_args *args, const struct identity *who)
{
    int pair[2];
    sigset_t mask;
    *keeper = (struct keeper){ .network = args->network };
    keeper->files_bytes = args->files_bytes.set ? args->files_bytes.value : 64u << 20;
    sigemptyset(&mask);
    sigaddset(&mask, SIGCHLD);
    sigprocmask(SIG_SETMASK, &mask, NULL);
    keeper->signals = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK);
    keeper->log = memfd_create("zygote", MFD_CLOEXEC);
    if (keeper->signals < 0 || keeper->log < 0)
        child_fail(EXHAUSTED, "no descriptor left: %s", strerror(errno));
    keeper->sockets = sockets_count();
    pair_make(pair, SOCK_SEQPACKET);
    keeper->zygote_pid = fork();
    if (keeper->zygote_pid == 0)
        become_zygote(args, who, pair[1], keeper->log);
    if (keeper->zygote_pid < 0)
        child_fail(EXHAUSTED, "the sandbox cannot start another process: %s", strerror(errno));
    close(pair[1]);
    keeper->zygote = pair[0];
    make_read_only();
}

/* --- rooms --------------------------------------------------------------------------------------- */

static void mount_places(uint64_t bytes)
{
    static const char *const places[] = { "/var/tmp", "/dev/shm", "/tmp" };
    char options[96];
    snprintf(options, sizeof options, "size=%llu,mode=1777,nr_inodes=65536",
             (unsigned long long)bytes);
    for (size_t i = 0; i < sizeof places / sizeof *places; i++)
        if (mount("tmpfs", places[i], "tmpfs", MS_NOSUID | MS_NODEV, options) < 0 &&
            (errno != ENOENT || i == 2))
            child_fail(UNSUPPORTED, "cannot mount on %s: %s", places[i], strerror(errno));
}

/* Wait for a child's message and the descriptors with it; a failure is passed on as ours. */
static ssize_t message_of(int from, int *fds, size_t n_fds)
{
    union {
        struct cmsghdr align;
        char room[CMSG_SPACE(MAX_FDS * sizeof(int))];
    } control;
    struct iovec part = { message, REPORT_MAX };
    struct msghdr received = {
        .msg_iov = &part, .msg_iovlen = 1,
        .msg_control = control.room, .msg_controllen = sizeof control.room,
    };
    ssize_t n;
    do
        n = recvmsg(from, &received, MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    if (n > 0 && message[0] == REPORT_FAILED) {
        send(CTL_FD, message, (size_t)n, MSG_NOSIGNAL);
        _exit(127);
    }
    struct cmsghdr *c = n > 0 ? CMSG_FIRSTHDR(&received) : NULL;
    if (n_fds && (!c || c->cmsg_len != CMSG_LEN(n_fds * sizeof(int))))
        return 0;
    if (n_fds)
        memcpy(fds, CMSG_DATA(c), n_fds * sizeof(int));
    return n;
}

static bool send_fds(int to, const int *fds, size_t n_fds)
{
    union {
        struct cmsghdr align;
        char room[CMSG_SPACE(MAX_FDS * sizeof(int))];
    } control = { 0 };
    uint8_t kind = REPORT_READY;
    struct iovec part = { &kind, 1 };
    struct msghdr sent = {
        .msg_iov = &part, .msg_iovlen = 1,
        .msg_control = control.room, .msg_controllen = CMSG_SPACE(n_fds * sizeof(int)),
    };
    struct cmsghdr *c = CMSG_FIRSTHDR(&sent);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(n_fds * sizeof(int));
    memcpy(CMSG_DATA(c), fds, n_fds * sizeof(int));
    return sendmsg(to, &sent, MSG_NOSIGNAL) > 0;
}

/* PID 1 of a room: makes its places, hands out what leads to it, then waits to be killed. Orphans end
 * without it. Its namespaces it must open itself: nobody else may look at it. */
static _Noreturn void live_in_room(uint64_t bytes, int ctl)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    signal(SIGCHLD, SIG_IGN);
    dup2(ctl, CTL_FD);
    mount_places(bytes);
    if (mkdir(WORK, 0755) < 0 || chown(WORK, CALL_UID, CALL_UID) < 0)
        child_fail(INTERNAL, "cannot make %s: %s", WORK, strerror(errno));
    int fds[ROOM_FDS];
    for (size_t i = 0; i < ROOM_FDS; i++) {
        fds[i] = open(room_files[i], O_RDONLY | O_CLOEXEC);
        if (fds[i] < 0)
            child_fail(INTERNAL, "cannot open %s of a call: %s", room_files[i], strerror(errno));
    }
    send_fds(CTL_FD, fds, ROOM_FDS);
    syscall(SYS_close_range, 0, ~0U, 0);
    for (;;)
        pause();
}

static void room_make(const struct keeper *keeper, struct room *room, int fds[ROOM_FDS])
{
    int pair[2];
    pair_make(pair, SOCK_SEQPACKET);
    long pid = syscall(SYS_clone, ROOM, 0, 0, 0, 0);
    if (pid == 0)
        live_in_room(keeper->files_bytes, pair[1]);
    if (pid < 0)
        child_fail(UNSUPPORTED, "cannot make the namespaces of a call: %s", strerror(errno));
    close(pair[1]);
    room->init = (pid_t)pid;
    if (message_of(pair[0], fds, ROOM_FDS) <= 0)
        child_fail(EXHAUSTED, "the namespaces of a call ended");
    close(pair[0]);
    room->work = fds[ROOM_FDS - 1];
}

/* Have the zygote fork into the room: namespaces, then the call's line, stdout and stderr. */
static void room_enter(const struct keeper *keeper, struct room *room, int fds[MAX_FDS])
{
    struct {
        uint8_t kind, unused[3];
        int32_t pid;
    } forked;
    if (!send_fds(keeper->zygote, fds, MAX_FDS) ||
        message_of(keeper->zygote, NULL, 0) != sizeof forked)
        zygote_failed(keeper);
    memcpy(&forked, message, sizeof forked);
    room->call = forked.pid;
    for (size_t i = 0; i < MAX_FDS; i++)
        close(fds[i]);
}

void room_open(const struct keeper *keeper, struct room *room)
{
    int line[2], out[2], err[2], fds[MAX_FDS];
    char first, text[TAIL + 1] = "";
    room_make(keeper, room, fds);
    pair_make(line, SOCK_STREAM);
    if (pipe2(out, O_CLOEXEC) < 0 || pipe2(err, O_CLOEXEC) < 0)
        child_fail(EXHAUSTED, "no descriptor left: %s", strerror(errno));
    fcntl(out[0], F_SETFL, O_RDONLY | O_NONBLOCK);
    fcntl(err[0], F_SETFL, O_RDONLY | O_NONBLOCK);
    fds[ROOM_FDS - 1] = line[1];
    fds[ROOM_FDS] = out[1];
    fds[ROOM_FDS + 1] = err[1];
    room_enter(keeper, room, fds);
    room->line = line[0];
    room->out = out[0];
    room->err = err[0];
    if (recv(room->line, &first, 1, 0) == 1) { /* it has given up what it must not have, and waits */
        fcntl(room->line, F_SETFL, O_RDWR | O_NONBLOCK);
        return;
    }
    ssize_t n = read(room->err, text, TAIL);
    text[n > 0 ? n : 0] = 0;
    child_fail(UNSUPPORTED, "a call cannot be prepared: %s", text);
}

void room_reap(const struct keeper *keeper, struct room *room)
{
    struct signalfd_siginfo pending[4];
    int status;
    pid_t pid;
    while (read(keeper->signals, pending, sizeof pending) > 0)
        ;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        if (pid == keeper->zygote_pid)
            zygote_failed(keeper);
        if (pid == room->init)
            room->init = 0;
        if (pid == room->call) {
            room->call = 0;
            room->status = status;
        } /* else a sibling that the call made with CLONE_PARENT */
    }
}

void room_empty(const struct keeper *keeper, struct room *room)
{
    struct pollfd ended = { .fd = keeper->signals, .events = POLLIN };
    if (room->init)
        kill(room->init, SIGKILL);
    for (room_reap(keeper, room); room->init || room->call; room_reap(keeper, room))
        poll(&ended, 1, -1);
}

void room_close(struct room *room)
{
    close(room->line);
    close(room->out);
    close(room->err);
    close(room->work);
}
