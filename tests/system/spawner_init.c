/* A stand-in for dsec-init in tests of the spawner: same descriptors, one request a connection.
 *
 * Reads a shell command to EOF, runs it as root of the sandbox's namespaces, sends its output and then
 * "\nstatus N\n". The command "@init" is answered by PID 1 itself: its ids and descriptors. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static char config[1 << 20];
static ssize_t config_size;

static void enter_and_run(int peer, const char *command)
{
    char *const arguments[] = { "sh", "-c", (char *)command, NULL };
    char *const environment[] = { "PATH=/bin:/sbin", "HOME=/root", NULL };

    for (int fd = 7; fd <= 10; fd++)
        if (setns(fd, 0) < 0) {
            dprintf(peer, "setns of %d: %m\n", fd);
            _exit(125);
        }
    if (setgid(0) < 0 || setuid(0) < 0 || dup2(peer, 1) < 0 || dup2(peer, 2) < 0)
        _exit(125);
    close_range(3, ~0u, 0);
    if (chdir("/") == 0)
        execve("/bin/sh", arguments, environment);
    _exit(126);
}

static void describe_self(int peer)
{
    dprintf(peer, "pid %d pgid %d uid %d euid %d gid %d groups %d config %zd\n", getpid(), getpgid(0),
            getuid(), geteuid(), getgid(), getgroups(0, NULL), config_size);
    for (int fd = 0; fd < 64; fd++) {
        char path[64], target[256];
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        ssize_t size = readlink(path, target, sizeof target - 1);
        if (size > 0 && fd != peer)
            dprintf(peer, "fd %d %.*s\n", fd, (int)size, target);
    }
}

int main(void)
{
    ssize_t got;
    prctl(PR_SET_DUMPABLE, 0);
    while ((got = read(4, config + config_size, sizeof config - (size_t)config_size)) > 0)
        config_size += got;
    for (;;) {
        static char command[1 << 16];
        size_t size = 0;
        int status = 0, peer = accept4(3, NULL, NULL, SOCK_CLOEXEC);
        if (peer < 0)
            continue;
        while ((got = read(peer, command + size, sizeof command - 1 - size)) > 0)
            size += (size_t)got;
        command[size] = 0;
        if (strcmp(command, "@init") == 0) {
            describe_self(peer);
        } else {
            pid_t pid = fork();
            if (pid == 0)
                enter_and_run(peer, command);
            waitpid(pid, &status, 0);
        }
        dprintf(peer, "\nstatus %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
        close(peer);
    }
}
