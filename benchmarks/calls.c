/* calls: what connect(2), packets and open(2) cost this thread, in the cgroup and network namespace
 * that it is told to enter.
 *
 * Reads a command per line and answers each with a number, nanoseconds of an operation's CPU time:
 *
 *   enter PROCS_FILE NETNS      be in this cgroup and namespace from now on (answers 0)
 *   connect ADDRESS PORT COUNT  connect(2) of a datagram socket: the hook, and no packet
 *   send ADDRESS PORT COUNT     send(2) of 64 bytes on a connected datagram socket
 *   tcp ADDRESS PORT COUNT      a connection made, accepted and reset
 *   stream ADDRESS PORT COUNT   64 KiB written at one end of a connection and read at the other
 *   open PATH COUNT             open(2) and close(2)
 *
 * The other end of tcp and stream is this thread, too: in namespace WORLD (`calls WORLD`), where
 * every address is local. What the kernel does for a packet up to the receiver's queue is then done
 * in this thread's time, and CPU time does not grow while others have the processor.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { CHUNK = 64 << 10, DATAGRAM = 64, LINE = 1024 };

struct place {
    struct sockaddr_storage address;
    socklen_t size;
};

static int world, current = -1; /* namespaces */
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

static int listener(const struct place *p)
{
    int yes = 1;
    check(setns(world, CLONE_NEWNET) == 0, "setns");
    int fd = socket_of(p, SOCK_STREAM);
    check(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) == 0, "SO_REUSEADDR");
    check(bind(fd, (const struct sockaddr *)&p->address, p->size) == 0, "bind");
    check(listen(fd, 8) == 0, "listen");
    if (current >= 0)
        check(setns(current, CLONE_NEWNET) == 0, "setns");
    return fd;
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
    for (long i = 0; i < count; i++)
        check(send(fd, chunk, DATAGRAM, 0) == DATAGRAM, "send");
    double end = now_ns();
    close(fd);
    return (end - start) / count;
}

static double handshakes(struct place p, long count)
{
    const struct linger reset = { .l_onoff = 1 };
    int server = listener(&p);
    double start = now_ns();
    for (long i = 0; i < count; i++) {
        int fd = socket_of(&p, SOCK_STREAM);
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
        join(fd, &p);
        int peer = accept(server, NULL, NULL);
        check(peer >= 0, "accept");
        close(fd);
        close(peer);
    }
    double end = now_ns();
    close(server);
    return (end - start) / count;
}

static double chunks(struct place p, long count)
{
    int room = 4 * CHUNK, server = listener(&p), fd = socket_of(&p, SOCK_STREAM);
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
    setsockopt(server, SOL_SOCKET, SO_RCVBUF, &room, sizeof room);
    join(fd, &p);
    int peer = accept(server, NULL, NULL);
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
    close(server);
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

static double enter(const char *procs, int namespace)
{
    int fd = open(procs, O_WRONLY | O_CLOEXEC);
    check(fd >= 0 && write(fd, "0", 1) == 1, procs);
    close(fd);
    check(setns(namespace, CLONE_NEWNET) == 0, "setns");
    current = namespace;
    return 0;
}

static double obey(char *line)
{
    static const struct {
        const char *name;
        double (*run)(struct place, long);
    } calls[] = { { "connect", connects }, { "send", sends }, { "tcp", handshakes },
                  { "stream", chunks } };
    char *word[4] = { 0 };
    int words = 0;
    for (char *w = strtok(line, " \n"); w && words < 4; w = strtok(NULL, " \n"))
        word[words++] = w;
    if (words == 3 && !strcmp(word[0], "enter"))
        return enter(word[1], atoi(word[2]));
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
    world = atoi(argv[1]);
    setvbuf(stdout, NULL, _IOLBF, 0);
    while (fgets(line, sizeof line, stdin))
        printf("%.3f\n", obey(line));
    return 0;
}
