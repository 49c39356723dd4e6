/* What root inside a sandbox tries against PID 1 and the host; each line says how it went.
 * As a set-user-id program, called by an ordinary user, it only says who it is. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static void report(const char *what, long result)
{
    printf("%s %s\n", what, result < 0 ? strerrorname_np(errno) : "DONE");
}

int main(int argc, char **argv)
{
    char byte;
    struct iovec here = { &byte, 1 }, there = { (void *)0x400000, 1 };

    if (argc > 1 && strcmp(argv[1], "whoami") == 0) {
        printf("uid %d euid %d\n", getuid(), geteuid());
        return 0;
    }
    if (argc > 1 && strcmp(argv[1], "drop") == 0) {
        if (setgid(1000) < 0 || setuid(1000) < 0)
            return 1;
        execl("/bin/setuid-attack", "setuid-attack", "whoami", NULL);
        return 1;
    }
    report("ptrace", ptrace(PTRACE_SEIZE, 1, NULL, NULL));
    report("vm_read", syscall(SYS_process_vm_readv, 1, &here, 1, &there, 1, 0));
    report("kill", kill(1, SIGKILL));
    long pidfd = syscall(SYS_pidfd_open, 1, 0);
    report("pidfd_getfd", pidfd < 0 ? pidfd : syscall(SYS_pidfd_getfd, pidfd, 3, 0));
    report("pidfd_signal", pidfd < 0 ? pidfd : syscall(SYS_pidfd_send_signal, pidfd, SIGKILL, 0, 0));
    report("setpriority", syscall(SYS_setpriority, 0, 1, 19));
    report("prlimit", syscall(SYS_prlimit64, 1, 7, &(long[2]){ 1, 1 }, NULL));
    report("environ", open("/proc/1/environ", O_RDONLY));
    report("root_link", open("/proc/1/root/etc", O_RDONLY));
    report("umount_proc", umount2("/proc", MNT_DETACH));
    report("umount_mask", umount2("/proc/keys", MNT_DETACH));
    report("umount_root", umount2("/", MNT_DETACH));
    report("remount_sys", mount(NULL, "/proc/sys", NULL, MS_REMOUNT | MS_BIND, NULL));
    report("write_sys", open("/proc/sys/vm/drop_caches", O_WRONLY));
    report("new_proc", mount("proc", "/tmp", "proc", 0, NULL));
    report("bind_proc", mount("/proc", "/tmp", NULL, MS_BIND, NULL));
    report("remount_dev", mount(NULL, "/dev", NULL, MS_REMOUNT | MS_BIND, NULL));
    report("mknod_disk", mknod("/tmp/disk", S_IFBLK | 0600, 0xfe00));
    report("mknod_null", mknod("/tmp/null", S_IFCHR | 0666, 0x103));
    report("own_tmpfs", mount("t", "/tmp", "tmpfs", 0, NULL));
    /* The classic way out of a chroot. */
    mkdir("/tmp/jail", 0700);
    int root = open("/", O_RDONLY | O_DIRECTORY);
    if (chroot("/tmp/jail") == 0 && fchdir(root) == 0) {
        for (int i = 0; i < 64; i++)
            if (chdir("..") < 0)
                break;
        report("above_root", open("file", O_RDONLY)); /* of the spawner's template */
        report("run_above", open("run/dsec", O_RDONLY));
    }
    return 0;
}
