/* calls: what connect(2), packets and open(2) cost this thread, in the cgroup and the network
 * namespace that it is told to enter.
 *
 *   calls OUTSIDE_PROCS    the cgroup.procs of a cgroup for which no program runs
 *
 * Reads a command per line and answers each with nanoseconds of CPU time per operation:
 *
 *   enter PROCS BOX WORLD       be in this cgroup and in namespace BOX from now on; the far ends of
 *                               what follows are in WORLD, where every address is local
 *   connect ADDRESS PORT COUNT  connect(2) of a datagram socket: the hook, and no packet
 *   send ADDRESS PORT COUNT     a datagram of 64 bytes sent and received
 *   tcp ADDRESS PORT COUNT      a connection made, accepted and reset
 *   stream ADDRESS PORT COUNT   64 KiB written at one end of a connection and read at the other
 *   open PATH COUNT             open(2) and close(2)
 *   domains COUNT PATH...       enter a Landlock domain in which these may be read; there are then
 *                               so many (answers 0)
 *
 * This thread is the far end, too, with sockets that were made outside: what the kernel does for a
 * packet up to the receiver's queue is done in this thread's time. CPU time does not grow while
 * others have the processor.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/landlock.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { CHUNK = 64 << 10, DATAGRAM = 64, LINE = 4096, WORDS = 32 };

struct place {
    struct sockaddr_storage address;
    socklen_t size;
};

enum { PORT = 9 }; /* of the far ends */

static const int ROOM = 4 * CHUNK;
static const char *outside;
static int far_stream = -1, far_datagrams = -1;
static char chunk[CHUNK];

static void fail(const char *what)
{
    fprintf(stderr, "calls: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void check(int ok, const char *what)
{
    if (!ok)
        fail(what);
}

static double now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}

static struct place place_of(const char *text, int port)
{
    struct place p = { .size = sizeof(struct sockaddr_in) };
    struct sockaddr_in *v4 = (struct sockaddr_in *)&p.address;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&p.address;
    if (inet_pton(AF_INET, text, &v4->sin_addr) == 1) {
        v4->sin_family = AF_INET;
        v4->sin_port = htons(port);
        return p;
    }
    errno = EINVAL;
    check(inet_pton(AF_INET6, text, &v6->sin6_addr) == 1, text);
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(port);
    p.size = sizeof *v6;
    return p;
}

static int socket_of(const struct place *p, int kind)
{
    int fd = socket(p->address.ss_family, kind | SOCK_CLOEXEC, 0);
    check(fd >= 0, "socket");
    return fd;
}

static void join(int fd, const struct place *p)
{
    check(connect(fd, (const struct sockaddr *)&p->address, p->size) == 0, "connect");
}

static double connects(struct place p, long count)
{
    int fd = socket_of(&p, SOCK_DGRAM);
    join(fd, &p);
    double start = now_ns();
    for (long i = 0; i < count; i++)
        join(fd, &p);
    double end = now_ns();
    close(fd);
    return (end - start) / count;
}

static double sends(struct place p, long count)
{
    int fd = socket_of(&p, SOCK_DGRAM);
    join(fd, &p);
    double start = now_ns();
    for (long i = 0; i < count; i++) {
        check(send(fd, chunk, DATAGRAM, 0) == DATAGRAM, "send");
        check(recv(far_datagrams, chunk, DATAGRAM, 0) == DATAGRAM, "recv");
    }
    double end = now_ns();
    close(fd);
    return (end - start) / count;
}

static double handshakes(struct place p, long count)
{
    const struct linger reset = { .l_onoff = 1 };
    double start = now_ns();
    for (long i = 0; i < count; i++) {
        int fd = socket_of(&p, SOCK_STREAM);
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
        join(fd, &p);
        int peer = accept(far_stream, NULL, NULL);
        check(peer >= 0, "accept");
        close(fd);
        close(peer);
    }
    double end = now_ns();
    return (end - start) / count;
}

static double chunks(struct place p, long count)
{
    int fd = socket_of(&p, SOCK_STREAM);
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &ROOM, sizeof ROOM);
    join(fd, &p);
    int peer = accept(far_stream, NULL, NULL);
    check(peer >= 0, "accept");
    double start = 0;
    for (long i = -count / 4; i < count; i++) { /* the window opens first */
        if (i == 0)
            start = now_ns();
        check(write(fd, chunk, CHUNK) == CHUNK, "write");
        check(recv(peer, chunk, CHUNK, MSG_WAITALL) == CHUNK, "recv");
    }
    double end = now_ns();
    close(fd);
    close(peer);
    return (end - start) / count;
}

static double opens(const char *path, long count)
{
    double start = now_ns();
    for (long i = 0; i < count; i++) {
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        check(fd >= 0, path);
        close(fd);
    }
    return (now_ns() - start) / count;
}

static int far_end(int kind)
{
    int yes = 1;
    struct place p = place_of("0.0.0.0", PORT);
    int fd = socket_of(&p, kind);
    check(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) == 0, "SO_REUSEADDR");
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &ROOM, sizeof ROOM);
    check(bind(fd, (const struct sockaddr *)&p.address, p.size) == 0, "bind");
    check(kind != SOCK_STREAM || listen(fd, 8) == 0, "listen");
    return fd;
}

static void move(const char *procs)
{
    int fd = open(procs, O_WRONLY | O_CLOEXEC);
    check(fd >= 0 && write(fd, "0", 1) == 1, procs);
    close(fd);
}

static double enter(const char *procs, int box, int world)
{
    if (far_stream >= 0) {
        close(far_stream);
        close(far_datagrams);
    }
    move(outside); /* a socket belongs to the cgroup that it is made in */
    check(setns(world, CLONE_NEWNET) == 0, "setns");
    far_stream = far_end(SOCK_STREAM);
    far_datagrams = far_end(SOCK_DGRAM);
    check(setns(box, CLONE_NEWNET) == 0, "setns");
    move(procs);
    return 0;
}

/* Landlock (landlock(7)). A domain is this thread's only; a file keeps the credentials it was opened
 * with, and so their domain: each is entered by a thread that leaves an open file behind.
 */
struct domain {
    char **path;
    int paths;
};

static void restrict_to(const struct domain *d)
{
    const __u64 handled = LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_WRITE_FILE;
    const struct landlock_ruleset_attr attr = { .handled_access_fs = handled };
    int ruleset = syscall(SYS_landlock_create_ruleset, &attr, sizeof attr, 0);
    check(ruleset >= 0, "landlock_create_ruleset");
    for (int i = 0; i < d->paths; i++) {
        struct landlock_path_beneath_attr rule = {
            .allowed_access = LANDLOCK_ACCESS_FS_READ_FILE,
            .parent_fd = open(d->path[i], O_PATH | O_CLOEXEC),
        };
        check(rule.parent_fd >= 0, d->path[i]);
        check(syscall(SYS_landlock_add_rule, ruleset, LANDLOCK_RULE_PATH_BENEATH, &rule, 0) == 0,
              "landlock_add_rule");
        close(rule.parent_fd);
    }
    check(syscall(SYS_landlock_restrict_self, ruleset, 0) == 0, "landlock_restrict_self");
    close(ruleset);
}

static void *leave_domain(void *argument)
{
    const struct domain *d = argument;
    restrict_to(d);
    check(open(d->path[0], O_RDONLY | O_CLOEXEC) >= 0, d->path[0]);
    return NULL;
}

static double domains(long count, char **path, int paths)
{
    struct domain d = { .path = path, .paths = paths };
    pthread_t thread;
    check(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "PR_SET_NO_NEW_PRIVS");
    for (long i = 1; i < count; i++) {
        errno = pthread_create(&thread, NULL, leave_domain, &d);
        check(!errno, "pthread_create");
        pthread_join(thread, NULL);
    }
    restrict_to(&d);
    return 0;
}

static double obey(char *line)
{
    static const struct {
        const char *name;
        double (*run)(struct place, long);
    } calls[] = { { "connect", connects }, { "send", sends }, { "tcp", handshakes },
                  { "stream", chunks } };
    char *word[WORDS] = { 0 };
    int words = 0;
    for (char *w = strtok(line, " \n"); w && words < WORDS; w = strtok(NULL, " \n"))
        word[words++] = w;
    if (words == 4 && !strcmp(word[0], "enter"))
        return enter(word[1], atoi(word[2]), atoi(word[3]));
    if (words > 2 && !strcmp(word[0], "domains"))
        return domains(atol(word[1]), word + 2, words - 2);
    if (words == 3 && !strcmp(word[0], "open"))
        return opens(word[1], atol(word[2]));
    for (unsigned i = 0; i < sizeof calls / sizeof *calls; i++)
        if (words == 4 && !strcmp(word[0], calls[i].name))
            return calls[i].run(place_of(word[1], atoi(word[2])), atol(word[3]));
    errno = EINVAL;
    fail("command");
    return 0;
}

int main(int argc, char **argv)
{
    char line[LINE];
    if (argc != 2)
        return 2;
    outside = argv[1];
    setvbuf(stdout, NULL, _IOLBF, 0);
    while (fgets(line, sizeof line, stdin))
        printf("%.3f\n", obey(line));
    return 0;
}
