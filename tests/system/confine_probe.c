/* Does what it is told, operation by operation, and says what became of each: an errno, 0 for success.
 *
 *     probe < OPERATIONS          one per line: a letter and its operands, separated by tabs
 *
 * Runs inside a sandbox, statically linked: once it runs it needs no file. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static int keep(int result)
{
    return result < 0 ? errno : 0;
}

static int open_as(const char *path, int flags)
{
    int fd = open(path, flags | O_CLOEXEC | O_NONBLOCK, 0644);
    if (fd < 0)
        return errno;
    close(fd);
    return 0;
}

/* The errno that execve failed with travels by the exit status; what runs exits with 0. */
static int execute(const char *path)
{
    int status;
    pid_t pid = fork();
    if (pid == 0) {
        execl(path, path, "nothing", (char *)NULL);
        _exit(errno);
    }
    return waitpid(pid, &status, 0) == pid && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static int perform(char what, char *first, char *second)
{
    switch (what) {
    case 'r': return open_as(first, O_RDONLY);
    case 'l': return open_as(first, O_RDONLY | O_DIRECTORY);
    case 'w': return open_as(first, O_WRONLY);
    case 'a': return open_as(first, O_WRONLY | O_APPEND);
    case 't': return keep(truncate(first, 3));
    case 'c': return open_as(first, O_WRONLY | O_CREAT);
    case 'd': return keep(mkdir(first, 0755));
    case 'f': return keep(mknod(first, S_IFIFO | 0644, 0));
    case 's': return keep(symlink("nowhere", first));
    case 'u': return keep(unlink(first));
    case 'D': return keep(rmdir(first));
    case 'm': return keep(rename(first, second));
    case 'L': return keep(link(first, second));
    case 'x': return execute(first);
    case 'i': return keep(ioctl(atoi(first), strtoul(second, NULL, 0), 0));
    case 'e': return (int)geteuid();
    case 'M': return keep(mount("none", first, "tmpfs", 0, NULL));
    case 'B': return keep(mount(first, second, NULL, MS_BIND, NULL));
    case 'U': return keep(umount2(first, MNT_DETACH));
    case 'S': return keep((int)syscall(atol(first), strtol(second, NULL, 0), 0, 0, 0, 0, 0));
    default: return -1;
    }
}

int main(int argc, char **argv)
{
    static char line[16384];
    (void)argv;
    if (argc > 1)
        return 0; /* it was to be executed, no more */
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        char *first = line + 1 + (line[1] == '\t'), *second = strchr(first, '\t');
        if (second)
            *second++ = 0;
        printf("%d\n", perform(line[0], first, second ? second : first));
    }
    return 0;
}
