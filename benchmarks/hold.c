/* hold: a program in a sandbox that has connections.
 *
 *   hold ADDRESS PORT COUNT
 *
 * For each line of its input: makes COUNT connections and prints "held"; when all of them have been
 * closed by somebody else, prints the errno of the last. The end of its input ends it.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MOST = 1024 };

static int made[MOST];

static void fail(const char *what)
{
    printf("%s: %s\n", what, strerror(errno));
    exit(1);
}

static void hold(const struct sockaddr_in *to, int count)
{
    for (int i = 0; i < count; i++) {
        made[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (made[i] < 0 || connect(made[i], (const struct sockaddr *)to, sizeof *to))
            fail("connect");
    }
}

static int wait_for_end(int count)
{
    int error = 0;
    socklen_t size = sizeof error;
    for (int i = 0; i < count; i++) {
        struct pollfd one = { .fd = made[i], .events = POLLIN };
        if (poll(&one, 1, -1) < 0)
            fail("poll");
        getsockopt(made[i], SOL_SOCKET, SO_ERROR, &error, &size);
        close(made[i]);
    }
    return error;
}

int main(int argc, char **argv)
{
    char line[16];
    struct sockaddr_in to = { .sin_family = AF_INET };
    int count = argc == 4 ? atoi(argv[3]) : 0;
    if (count < 1 || count > MOST || inet_pton(AF_INET, argv[1], &to.sin_addr) != 1)
        return 2;
    to.sin_port = htons(atoi(argv[2]));
    setvbuf(stdout, NULL, _IOLBF, 0);
    while (fgets(line, sizeof line, stdin)) {
        hold(&to, count);
        printf("held\n");
        printf("%d\n", wait_for_end(count));
    }
    return 0;
}
