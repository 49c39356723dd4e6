#include "vm.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "config.h"
#include "loop.h"

#define PORT_NAME "dsec.agent\n"
#define PORT_WAIT_US 30000000 /* its device may be probed while we run */
#define PORT_POLL_US 2000
#define FILES_MAX 1048576 /* fs.nr_open */

enum vm_state vm_state = VM_NONE;
bool vm_service;

int vm_mount(const char *type, const char *path, unsigned long flags, const char *options)
{
    if (mkdir(path, 0755) < 0 && errno != EEXIST)
        return -errno;
    return mount("none", path, type, flags, options) < 0 ? -errno : 0;
}

int vm_place(int fd, int number)
{
    if (fd < 0)
        return fd;
    int error = dup3(fd, number, O_CLOEXEC) < 0 ? -errno : 0;
    close(fd);
    return error;
}

static int open_path(const char *path, int flags)
{
    int fd = open(path, flags | O_CLOEXEC);
    return fd < 0 ? -errno : fd;
}

static int mount_kernel_trees(void)
{
    int error = vm_mount("devtmpfs", "/dev", MS_NOSUID, "mode=0755");
    if (error == -EBUSY) /* CONFIG_DEVTMPFS_MOUNT */
        error = 0;
    if (!error)
        error = vm_mount("proc", "/proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    if (!error)
        error = vm_mount("sysfs", "/sys", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    if (!error)
        error = vm_mount("cgroup2", "/sys/fs/cgroup", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    return error;
}

/* Nothing of ours may come to lie on a descriptor that vm.begin fills. */
static int reserve_places(void)
{
    int fd;
    do
        fd = open_path("/dev/null", O_RDWR);
    while (fd >= 0 && fd < FD_FIRST_FREE);
    if (fd >= 0)
        close(fd);
    return fd < 0 ? fd : 0;
}

static int set_limits(void)
{
    const struct rlimit files = { FILES_MAX, FILES_MAX }, core = { 0, 0 };
    int fd = open_path("/proc/self/oom_score_adj", O_WRONLY);
    if (fd < 0)
        return fd;
    int error = write(fd, "-1000", 5) == 5 ? 0 : -errno; /* without us the kernel panics */
    close(fd);
    if (!error && (setrlimit(RLIMIT_NOFILE, &files) < 0 || setrlimit(RLIMIT_CORE, &core) < 0))
        error = -errno;
    return error;
}

/* Is the port of this directory of /sys ours? */
static bool is_ours(int ports, const char *port)
{
    char path[64], name[sizeof PORT_NAME] = "";
    if (snprintf(path, sizeof path, "%s/name", port) >= (int)sizeof path)
        return false;
    int fd = openat(ports, path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? 0 : read(fd, name, sizeof name);
    if (fd >= 0)
        close(fd);
    return n == sizeof PORT_NAME - 1 && memcmp(name, PORT_NAME, sizeof PORT_NAME - 1) == 0;
}

static int find_port(void)
{
    char path[64];
    int fd = -ENODEV;
    DIR *ports = opendir("/sys/class/virtio-ports");
    for (struct dirent *d; ports && fd == -ENODEV && (d = readdir(ports));)
        if (d->d_name[0] != '.' && is_ours(dirfd(ports), d->d_name) &&
            snprintf(path, sizeof path, "/dev/%s", d->d_name) < (int)sizeof path)
            fd = open_path(path, O_RDWR | O_NONBLOCK);
    if (ports)
        closedir(ports);
    return fd;
}

/* The kernel lets nobody else open it while we have it. */
static int open_port(void)
{
    int fd;
    for (uint64_t until = now_us() + PORT_WAIT_US; (fd = find_port()) == -ENODEV;) {
        if (now_us() > until)
            break;
        usleep(PORT_POLL_US);
    }
    return vm_place(fd, FD_LISTEN);
}

static int run_steps(struct steps *s)
{
    STEP(s, "kernel_trees", vm_service ? 0 : mount_kernel_trees());
    STEP(s, "descriptors", reserve_places());
    STEP(s, "limits", set_limits());
    STEP(s, "random", vm_random_open());
    STEP(s, "vmstat", vm_kills_open());
    STEP(s, "shell", vm_service ? 0 : vm_place(open_path("/shell", O_RDONLY), FD_SHELL));
    STEP(s, "port", open_port());
    return 0;
}

const char *vm_open(bool service)
{
    static char problem[128];
    struct steps steps = { .fail = "" };
    umask(022);
    vm_state = VM_WAITING;
    vm_service = service;
    int error = run_steps(&steps);
    if (!error)
        return NULL;
    snprintf(problem, sizeof problem, "the machine cannot start, step %s: %s", steps.current,
             strerror(-error));
    return problem;
}

static bool starts_with(struct mp_bytes text, const char *prefix)
{
    size_t n = strlen(prefix);
    return text.n >= n && memcmp(text.p, prefix, n) == 0;
}

static bool refuse(struct call *call, const char *reason)
{
    struct failure failure = { .code = "unsupported", .reason = reason };
    snprintf(failure.message, sizeof failure.message, "%s", reason);
    call_fail_with(call, &failure);
    return false;
}

bool vm_admits(struct call *call, struct mp_bytes op)
{
    if (vm_state == VM_NONE && starts_with(op, "vm."))
        return refuse(call, "this sandbox is no virtual machine");
    if (vm_state != VM_NONE && (mp_equal(op, "root.swap") || mp_equal(op, "fncall.serve")))
        return refuse(call, "descriptors cannot be passed into a virtual machine");
    if (vm_service && mp_equal(op, "vm.pack"))
        return refuse(call, "a machine with a root of its own has no layers");
    if (vm_state == VM_WAITING && !mp_equal(op, "sys.ping") && !mp_equal(op, "vm.begin")) {
        call_fail(call, "wrong_state", "the machine has not begun: vm.begin comes first");
        return false;
    }
    return true;
}

static void fail_build(struct call *call, const struct vm_build *build, int error)
{
    struct failure failure = { .code = "internal", .reason = build->steps.current };
    const char *where = build->where;
    snprintf(failure.message, sizeof failure.message, "the machine cannot begin, step %s%s%.100s: %s",
             build->steps.current, *where ? " at " : "", where, strerror(-error));
    call_fail_with(call, &failure);
}

static void reply_steps(struct call *call, const struct steps *steps)
{
    struct mp_writer w = reply_begin(call);
    mp_put_map(&w, 1);
    mp_put_text(&w, "steps_us");
    mp_put_map(&w, steps->count);
    for (uint32_t i = 0; i < steps->count; i++) {
        mp_put_text(&w, steps->times[i].name);
        mp_put_u64(&w, steps->times[i].ns / 1000);
    }
    reply_send(call, &w);
}

/* The configuration is kept for as long as the machine lives; the frame it came in is not. */
static const char *keep_config(struct mp_bytes text, uint8_t **kept)
{
    *kept = map_alloc(text.n);
    if (!*kept)
        return "no memory for the configuration";
    memcpy(*kept, text.p, text.n);
    return config_parse((struct mp_bytes){ *kept, text.n });
}

void vm_begin(struct call *call, struct mp_bytes raw)
{
    static struct vm_args args;
    static struct vm_build build;
    uint8_t *kept;
    if (vm_state == VM_BEGUN) {
        call_fail(call, "wrong_state", "the machine has begun already");
        return;
    }
    const char *problem = args_vm_begin(raw, vm_service, &args);
    if (problem) {
        call_fail(call, "invalid_argument", "%s", problem);
        return;
    }
    struct config before = config;
    build = (struct vm_build){ .steps = { .fail = "", .trace = true } };
    problem = keep_config(args.config, &kept);
    int error = problem ? 0 : vm_build(&build, &args);
    if (problem)
        call_fail(call, "invalid_argument", "field \"config\": %s", problem);
    else if (error)
        fail_build(call, &build, error);
    if (problem || error) {
        config = before;
        map_free(kept, args.config.n);
        return;
    }
    vm_state = VM_BEGUN;
    reply_steps(call, &build.steps);
}

/* The former configuration stays mapped: what it names may be in use. */
void vm_renew(struct call *call, struct mp_bytes raw)
{
    static struct vm_args args;
    static struct vm_build build;
    uint8_t *kept;
    const char *problem = args_vm_renew(raw, &args);
    if (problem) {
        call_fail(call, "invalid_argument", "%s", problem);
        return;
    }
    struct config before = config;
    build = (struct vm_build){ .steps = { .fail = "", .trace = true } };
    problem = keep_config(args.config, &kept);
    int error = problem ? 0 : vm_build_again(&build, &args);
    if (!problem && !error) {
        reply_steps(call, &build.steps);
        return;
    }
    if (problem)
        call_fail(call, "invalid_argument", "field \"config\": %s", problem);
    else
        fail_build(call, &build, error);
    config = before;
    map_free(kept, args.config.n);
}

void vm_clock(struct call *call, struct mp_bytes raw)
{
    struct vm_args args;
    const char *problem = args_vm_clock(raw, &args);
    if (problem) {
        call_fail(call, "invalid_argument", "%s", problem);
        return;
    }
    int error = vm_time_set(args.time_ns.value);
    if (!error)
        error = vm_entropy_add(args.entropy);
    if (error)
        call_fail(call, "internal", "the clock cannot be set: %s", strerror(-error));
    else
        reply_nil(call);
}
