/* The root of a virtual machine: read-only layers and an upper, on devices, stacked as in a container. */
#include <fcntl.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include "config.h"
#include "loop.h"
#include "vm.h"

#define DEVICE_WAIT_US 2000000 /* drivers may find theirs while we run */
#define DEVICE_POLL_US 2000
#define ROOT "/root"

static int make_directory(const char *path)
{
    return mkdir(path, 0755) < 0 && errno != EEXIST ? -errno : 0;
}

static int wait_for_device(const char *path)
{
    struct stat st;
    for (uint64_t until = now_us() + DEVICE_WAIT_US; stat(path, &st) < 0; usleep(DEVICE_POLL_US))
        if (errno != ENOENT || now_us() > until)
            return -errno;
    return S_ISBLK(st.st_mode) ? 0 : -ENOTBLK;
}

static int mount_device(struct vm_build *build, struct mp_bytes device, const char *type,
                        const char *place, unsigned long flags, const char *options)
{
    snprintf(build->where, sizeof build->where, "%.*s", (int)device.n, device.p);
    int error = wait_for_device(build->where);
    if (!error)
        error = make_directory(place);
    if (!error && mount(build->where, place, type, flags, options) < 0)
        error = -errno;
    if (!error)
        build->where[0] = 0;
    return error;
}

static int mount_layers(struct vm_build *build, const struct vm_args *args)
{
    char place[32];
    struct mp_reader r = mp_reader_of(args->layers.p, args->layers.n);
    uint32_t n = mp_get_array(&r);
    int error = make_directory("/lower");
    for (uint32_t i = 0; i < n && !error; i++) {
        snprintf(place, sizeof place, "/lower/%u", i);
        error = mount_device(build, vm_next_layer(&r), "erofs", place, MS_RDONLY,
                             args->dax ? "dax=always" : NULL);
    }
    return error;
}

/* What an overlay shows of its root directory is the upper's: a fresh one takes over the top layer's. */
static int inherit_root(uint32_t layers)
{
    char top[32];
    struct stat st;
    snprintf(top, sizeof top, "/lower/%u", layers - 1);
    if (stat(top, &st) < 0 || chown("/upper/u", st.st_uid, st.st_gid) < 0 ||
        chmod("/upper/u", st.st_mode & 07777) < 0)
        return -errno;
    return 0;
}

static int mount_upper(struct vm_build *build, const struct vm_args *args)
{
    struct mp_reader r = mp_reader_of(args->layers.p, args->layers.n);
    int error = mount_device(build, args->upper, "ext4", "/upper", 0, NULL);
    if (!error && mkdir("/upper/u", 0755) == 0)
        error = inherit_root(mp_get_array(&r));
    else if (!error && errno != EEXIST)
        error = -errno;
    if (!error)
        error = make_directory("/upper/w");
    if (!error)
        error = make_directory("/upper/spool");
    return error;
}

static int open_upper(void)
{
    int upper = open("/upper", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int error = vm_place(upper < 0 ? -errno : upper, FD_UPPER);
    if (error)
        return error;
    int spool = open("/upper/spool", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return vm_place(spool < 0 ? -errno : spool, FD_SPOOL);
}

/* Settings as in a container (spawner/root.c), but not volatile: the upper may be mounted again. */
static int mount_overlay(const struct vm_args *args)
{
    char options[VM_LAYERS * 16 + 128];
    struct mp_reader r = mp_reader_of(args->layers.p, args->layers.n);
    int n = snprintf(options, sizeof options,
                     "redirect_dir=on,index=off,metacopy=off,upperdir=/upper/u,workdir=/upper/w,lowerdir=");
    for (uint32_t i = mp_get_array(&r); i-- > 0;) /* topmost first */
        n += snprintf(options + n, sizeof options - (size_t)n, "/lower/%u%s", i, i ? ":" : "");
    return vm_mount("overlay", ROOT, 0, options);
}

/* The initramfs cannot be left by pivot_root. What was mounted there stays, out of reach. */
static int switch_root(void)
{
    if (chdir(ROOT) < 0 || mount(".", "/", NULL, MS_MOVE, NULL) < 0 || chroot(".") < 0 ||
        chdir("/") < 0)
        return -errno;
    return 0;
}

static int link_streams(void)
{
    static const char *const links[][2] = {
        { "/proc/self/fd", "/dev/fd" }, { "/proc/self/fd/0", "/dev/stdin" },
        { "/proc/self/fd/1", "/dev/stdout" }, { "/proc/self/fd/2", "/dev/stderr" },
    };
    for (size_t i = 0; i < sizeof links / sizeof *links; i++)
        if (symlink(links[i][0], links[i][1]) < 0 && errno != EEXIST)
            return -errno;
    return 0;
}

static int mount_kernel_trees(void)
{
    const unsigned long closed = MS_NOSUID | MS_NODEV | MS_NOEXEC;
    int error = vm_mount("proc", "/proc", closed, NULL);
    if (!error)
        error = vm_mount("sysfs", "/sys", closed, NULL);
    if (!error)
        error = vm_mount("cgroup2", "/sys/fs/cgroup", closed, NULL);
    if (!error)
        error = vm_mount("devtmpfs", "/dev", MS_NOSUID, "mode=0755");
    if (!error)
        error = vm_mount("devpts", "/dev/pts", MS_NOSUID | MS_NOEXEC, "gid=5,mode=0620,ptmxmode=0666");
    if (!error)
        error = vm_mount("tmpfs", "/dev/shm", MS_NOSUID | MS_NODEV, "mode=1777");
    return error ? error : link_streams();
}

int vm_root_assemble(struct vm_build *build, const struct vm_args *args)
{
    struct steps *s = &build->steps;
    STEP(s, "layers", mount_layers(build, args));
    STEP(s, "upper", mount_upper(build, args));
    STEP(s, "upper_open", open_upper());
    STEP(s, "overlay", mount_overlay(args));
    STEP(s, "switch_root", switch_root());
    STEP(s, "kernel_trees", mount_kernel_trees());
    return 0;
}

static int make_parents(char *path)
{
    int error = 0;
    for (char *p = strchr(path, '/'); p && !error; p = strchr(p + 1, '/')) {
        *p = 0;
        error = make_directory(path);
        *p = '/';
    }
    return error;
}

static int write_content(int fd, struct mp_bytes content)
{
    while (content.n) {
        ssize_t n = write(fd, content.p, content.n);
        if (n < 0)
            return -errno;
        content.p += n;
        content.n -= (size_t)n;
    }
    return 0;
}

/* In the place of whatever the layers have there: a link, as resolv.conf often is, is not followed. */
static int write_file(char *path, const struct vm_file *file)
{
    int error = make_parents(path);
    if (!error && unlink(path) < 0 && errno != ENOENT)
        error = -errno;
    int fd = error ? -1 : open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
        return error ? error : -errno;
    error = write_content(fd, file->content);
    if (!error && fchmod(fd, file->mode) < 0)
        error = -errno;
    close(fd);
    return error;
}

int vm_files_write(struct vm_build *build, const struct vm_args *args)
{
    struct mp_reader r = mp_reader_of(args->files.p, args->files.n);
    int error = 0;
    for (uint32_t left = args->files.p ? mp_get_array(&r) : 0; left && !error; left--) {
        struct vm_file file = vm_next_file(&r);
        snprintf(build->where, sizeof build->where, "%.*s", (int)file.path.n, file.path.p);
        error = write_file(build->where, &file); /* relative to the working directory, the root */
    }
    if (!error)
        build->where[0] = 0;
    return error;
}
