/* PID 1 of a guest that a test boots: prints what it finds as lines "name: value", then powers off.
 * Every line comes from a real use of the thing, where there is a way to use it. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/bpf.h>
#include <linux/io_uring.h>
#include <linux/prctl.h>
#include <linux/reboot.h>
#include <linux/stat.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fanotify.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static void say(const char *name, const char *value)
{
    printf("%s: %s\n", name, value);
}

/* For calls that return -1: "ok" or what went wrong. */
static void say_result(const char *name, long result)
{
    say(name, result < 0 ? strerror(errno) : "ok");
}

static void say_file(const char *name, const char *path)
{
    char text[4096];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? -1 : read(fd, text, sizeof text - 1);

    if (size < 0) {
        say(name, strerror(errno));
    } else {
        text[size] = 0;
        for (char *at = text; *at; at++)
            if (*at == '\n')
                *at = at[1] ? ' ' : 0;
        say(name, text);
    }
    if (fd >= 0)
        close(fd);
}

/* `name entry: content of its file`, or "yes", for each link of a directory: devices of a class or of
 * a driver, namespaces of a process. */
static void say_each(const char *name, const char *folder, const char *file)
{
    char path[512], label[600];
    DIR *listing = opendir(folder);
    struct dirent *entry;

    if (!listing) {
        say(name, strerror(errno));
        return;
    }
    while ((entry = readdir(listing))) {
        if (entry->d_type != DT_LNK || !strcmp(entry->d_name, "module"))
            continue;
        snprintf(label, sizeof label, "%s %s", name, entry->d_name);
        snprintf(path, sizeof path, "%s/%s/%s", folder, entry->d_name, file ? file : "");
        if (file)
            say_file(label, path);
        else
            say(label, "yes");
    }
    closedir(listing);
}

static void mounts(void)
{
    say_result("devtmpfs", mount("dev", "/dev", "devtmpfs", 0, NULL));
    say_result("proc", mount("proc", "/proc", "proc", 0, NULL));
    say_result("sysfs", mount("sysfs", "/sys", "sysfs", 0, NULL));
    say_result("cgroup2", mount("cgroup2", "/sys/fs/cgroup", "cgroup2", 0, NULL));
    say_result("securityfs", mount("security", "/sys/kernel/security", "securityfs", 0, NULL));
}

/* The root as a sandbox has it: an EROFS layer through DAX, an ext4 upper, an overlay of both. */
static void root(void)
{
    struct statx status = {0};
    int fd;

    mkdir("/lower", 0755);
    mkdir("/upper", 0755);
    mkdir("/root", 0755);
    say_result("erofs", mount("/dev/pmem0", "/lower", "erofs", MS_RDONLY, "dax=always"));
    say_file("layer", "/lower/hello");
    syscall(SYS_statx, AT_FDCWD, "/lower/large", 0, STATX_BASIC_STATS, &status);
    say("dax", status.stx_attributes & STATX_ATTR_DAX ? "ok" : "off");
    say_result("ext4", mount("/dev/vda", "/upper", "ext4", 0, NULL));
    mkdir("/upper/u", 0755);
    mkdir("/upper/w", 0700);
    say_result("overlay", mount("root", "/root", "overlay", 0,
                                "lowerdir=/lower,upperdir=/upper/u,workdir=/upper/w,"
                                "redirect_dir=on"));
    fd = open("/root/hello", O_WRONLY | O_APPEND);
    say_result("copy up", fd < 0 || write(fd, "!", 1) != 1 ? -1 : 0);
    close(fd);
    say_file("changed", "/root/hello");
    mkdir("/tmp", 01777);
    say_result("tmpfs", mount("tmp", "/tmp", "tmpfs", 0, NULL));
}

static void calls(void)
{
    struct io_uring_params ring = {0};
    union bpf_attr map = {.map_type = BPF_MAP_TYPE_ARRAY, .key_size = 4, .value_size = 4,
                          .max_entries = 1};
    unsigned char seed[16];

    say_result("io_uring", syscall(SYS_io_uring_setup, 4, &ring));
    say_result("bpf", syscall(SYS_bpf, BPF_MAP_CREATE, &map, sizeof map));
    say_result("userfaultfd", syscall(SYS_userfaultfd, O_CLOEXEC));
    say_result("fanotify", fanotify_init(FAN_CLASS_NOTIF, O_RDONLY));
    say_result("landlock", syscall(SYS_landlock_create_ruleset, NULL, 0, 1));
    say_result("keys", syscall(SYS_keyctl, 0, -2, 1));
    say_result("vsock", socket(AF_VSOCK, SOCK_STREAM, 0));
    say_result("ipv6", socket(AF_INET6, SOCK_STREAM, 0));
    say_result("core scheduling", syscall(SYS_prctl, PR_SCHED_CORE, PR_SCHED_CORE_CREATE, 0, 0, 0));
    say_result("random", syscall(SYS_getrandom, seed, sizeof seed, 1));
}

int main(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    setvbuf(stdout, NULL, _IOLBF, 0);
    printf("booted: %ld.%03ld\n", (long)now.tv_sec, now.tv_nsec / 1000000);
    mounts();
    root();
    calls();
    say_each("port", "/sys/class/virtio-ports", "name");
    say_each("network", "/sys/class/net", "address");
    say_each("balloon", "/sys/bus/virtio/drivers/virtio_balloon", "features");
    say_each("pvpanic pci", "/sys/bus/pci/drivers/pvpanic-pci", NULL);
    say_each("pvpanic isa", "/sys/bus/platform/drivers/pvpanic-mmio", NULL);
    say_each("vmgenid", "/sys/bus/platform/drivers/vmgenid", NULL);
    say_each("rtc", "/sys/class/rtc", "name");
    say_each("namespace", "/proc/self/ns", NULL);
    say_file("random source", "/sys/class/misc/hw_random/rng_current");
    say_file("fw_cfg", "/sys/firmware/qemu_fw_cfg/rev");
    say_file("lsm", "/sys/kernel/security/lsm");
    say_file("controllers", "/sys/fs/cgroup/cgroup.controllers");
    say_file("pressure", "/proc/pressure/memory");
    say_file("damon", "/sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds");
    say_file("zram", "/sys/block/zram0/comp_algorithm");
    say_file("swaps", "/proc/swaps");
    say_file("filesystems", "/proc/filesystems");
    say_file("clocksource", "/sys/devices/system/clocksource/clocksource0/current_clocksource");
    say_file("memory", "/proc/meminfo");
    say_file("version", "/proc/version");
    say("end", "ok");
    fflush(stdout);
    reboot(LINUX_REBOOT_CMD_POWER_OFF);
    return 1;
}
