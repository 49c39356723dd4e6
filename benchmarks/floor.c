/* dsec-floor: how fast this kernel makes, uses and destroys the very same sandbox from a bare C loop.
 *
 *     dsec-floor -i IMAGE [-b BLOB]... [-n WORKERS] [-c COUNT] [-d DIR] [-g CGROUP] [-x COMMAND]
 *                [-f BASE_FILTER] [-s FILTER] [-m MASK]... [-r READ_ONLY]... [-l GROUP=FILE=VALUE]...
 *
 * It shares the spawner's sources, so the isolation and its order are the same: EROFS lower idmapped for the
 * range, overlay, masks, two mount namespaces, PID 1 under an unmapped uid. What it lacks is Python, the
 * journal, requests and a scheduler; user and network namespaces are pooled. PID 1 is this program
 * too: it runs COMMAND (default /bin/true) once in the inner namespaces, under FILTER, for each connection.
 * The result is one JSON object: rate of all workers together and the median of each step in µs.
 */
#include <getopt.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "native/filter.h"
#include "native/kernel.h"
#include "native/mounts.h"
#include "native/namespaces.h"
#include "native/tree.h"
#include "spawner/create.h"
#include "spawner/destroy.h"

#define UID_BASE 0x70000000u
#define BLOBS_MAX 256
#define ROWS_MAX 48
#define UPPER_BYTES (64u << 20)

static struct {
    const char *image, *folder, *cgroup, *command, *base_filter, *filter;
    const char *blobs[BLOBS_MAX], *masks[LIST_MAX], *read_only[LIST_MAX];
    char *limits[LIST_MAX]; /* a v1 group to live in, and a limit to set in it for each sandbox */
    int blob_count, mask_count, read_only_count, limit_count, workers, count;
} options = { .folder = "/dev/shm/dsec-floor", .command = "/bin/true", .workers = 1, .count = 200 };

/* Shared by all workers: one row a step, one column an operation. */
struct table {
    char names[ROWS_MAX][24];
    int rows;
    uint32_t ns[];
};

static void die(const char *what, int error)
{
    fprintf(stderr, "dsec-floor: %s: %s\n", what, strerror(-error));
    exit(1);
}

/* --- PID 1 ---------------------------------------------------------------------------------------- */

static void run_command(const struct sock_fprog *program, const char *path)
{
    char *const arguments[] = { (char *)path, NULL };
    char *const environment[] = { NULL };

    for (int fd = 7; fd <= 10; fd++)
        if (setns(fd, 0) < 0)
            _exit(125);
    if (syscall(SYS_setresgid, 0, 0, 0) < 0 || syscall(SYS_setresuid, 0, 0, 0) < 0)
        _exit(124);
    if (program->len && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program) < 0)
        _exit(123);
    execve(path, arguments, environment);
    _exit(126);
}

/* Configuration: the command's path, NUL, then the filter's instructions. */
static int be_init(void)
{
    static char config[64u << 10];
    static struct sock_filter filter[4096];
    size_t size = 0;
    ssize_t got;

    prctl(PR_SET_DUMPABLE, 0);
    while ((got = read(4, config + size, sizeof config - size)) > 0)
        size += (size_t)got;
    close(4);
    size_t skip = strlen(config) + 1, bytes = size > skip ? size - skip : 0;
    if (bytes > sizeof filter)
        return 1;
    memcpy(filter, config + skip, bytes);
    struct sock_fprog program = { (unsigned short)(bytes / sizeof *filter), filter };
    for (;;) {
        int status = 0, peer = accept4(3, NULL, NULL, SOCK_CLOEXEC);
        if (peer < 0)
            return 1;
        pid_t pid = vfork();
        if (pid == 0)
            run_command(&program, config);
        if (pid < 0 || waitpid(pid, &status, 0) < 0)
            status = -1;
        char answer = status == 0 ? 'y' : 'n';
        if (write(peer, &answer, 1) != 1)
            return 1;
        close(peer);
    }
}

/* --- a worker --------------------------------------------------------------------------------------- */

struct worker {
    int number, fds[FDS_GIVEN + 1]; /* user and network namespace, the layer */
    struct host host;
    struct container_plan plan;
    struct creation creation;
    struct destruction destruction;
    char cgroup[256], runtime[256];
    char config[64u << 10];
};

static int await_command(const struct worker *w)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    char answer = 0;

    snprintf(address.sun_path, sizeof address.sun_path, "agent.sock");
    int folder = host_open(&w->host, w->runtime, O_PATH | O_DIRECTORY);
    if (folder < 0 || fchdir(folder) < 0)
        return -errno;
    close(folder);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) < 0)
        return -errno;
    ssize_t got = read(fd, &answer, 1);
    close(fd);
    if (chdir("/") < 0)
        return -errno;
    return got == 1 && answer == 'y' ? 0 : -ECHILD;
}

static int destroy_container(struct worker *w, int pidfd)
{
    struct destruction *d = &w->destruction;
    d->pidfd = pidfd;
    d->netns = w->fds[1];
    d->looks = 0;
    d->plan = (struct destroy_plan){ .cgroup = w->cgroup, .runtime_dir = w->runtime, .upper_dir = "", .timeout_ms = 10000 };
    int error = begin_destroy(d, &w->host);
    struct pollfd entry = { .fd = pidfd, .events = POLLIN };
    poll(&entry, 1, 10000);
    while (error == 0 && (error = finish_destroy(d, &w->host)) == -EAGAIN)
        error = poll(NULL, 0, RETRY_MS);
    return error;
}

static void record(struct table *table, const struct worker *w, int column, int total,
                   const uint64_t marks[3])
{
    const struct steps *steps = &w->creation.steps;
    int rows = (int)steps->count + 3;
    for (int row = 0; row < rows && row < ROWS_MAX; row++) {
        static const char *const own[] = { "create", "command", "destroy" };
        bool step = row < (int)steps->count;
        int extra = row - (int)steps->count;
        snprintf(table->names[row], sizeof table->names[row], "%s",
                 step ? steps->times[row].name : own[extra]);
        table->ns[row * total + column] = (uint32_t)(step ? steps->times[row].ns : marks[extra]);
    }
    table->rows = rows;
}

static void operate(struct worker *w, struct table *table, int column, int total)
{
    uint64_t start = now_ns();
    int error = create_container(&w->creation, &w->host, &w->plan, w->fds);
    if (error < 0)
        die(w->creation.steps.current, error);
    uint64_t made = now_ns();
    error = await_command(w);
    if (error < 0)
        die("command", error);
    uint64_t used = now_ns();
    error = destroy_container(w, w->creation.pidfd);
    if (error < 0)
        die(w->destruction.step, error);
    uint64_t marks[3] = { made - start, used - made, now_ns() - used };
    record(table, w, column, total, marks);
}

static void fill_config(struct worker *w)
{
    size_t size = strlen(options.command) + 1;
    memcpy(w->config, options.command, size);
    if (options.filter) {
        FILE *file = fopen(options.filter, "rb");
        if (!file)
            die(options.filter, -errno);
        size += fread(w->config + size, 1, sizeof w->config - size, file);
        fclose(file);
    }
    w->plan.init_config = (struct mp_bytes){ (const uint8_t *)w->config, size };
}

static void fill_plan(struct worker *w)
{
    static const char *const files[] = { "etc/hostname", "etc/hosts", "etc/resolv.conf",
                                         "etc/machine-id" };
    struct container_plan *plan = &w->plan;

    *plan = (struct container_plan){ .sandbox = "floor", .cgroup = w->cgroup, .runtime_dir = w->runtime,
                                     .spool_dir = options.folder, .upper_dir = "", .dev_tree = "",
                                     .hostname = "floor", .fail_step = "", .lowers = 1,
                                     .uid_base = UID_BASE + 65536u * (uint32_t)w->number,
                                     .upper_bytes = UPPER_BYTES, .trace = true };
    plan->owner_uid = plan->uid_base + 65535;
    plan->read_only_count = (uint32_t)options.read_only_count;
    memcpy(plan->read_only, options.read_only, sizeof options.read_only);
    for (; plan->file_count < 4; plan->file_count++)
        plan->files[plan->file_count] = (struct new_file){
            files[plan->file_count], { (const uint8_t *)"floor\n", 6 }, 0644
        };
    plan->masked_count = (uint32_t)options.mask_count;
    memcpy(plan->masked, options.masks, sizeof options.masks);
    snprintf(w->cgroup, sizeof w->cgroup, "%s/%d", options.cgroup, w->number);
    snprintf(w->runtime, sizeof w->runtime, "%s/sb%d", options.folder, w->number);
    fill_config(w);
}

/* One v1 group a worker, which its sandboxes inherit: what slots are to the daemon, without the moves. */
static void enter_groups(struct worker *w)
{
    static char paths[LIST_MAX][512];
    char procs[600];

    for (int i = 0; i < options.limit_count; i++) {
        const char *group = strtok(options.limits[i], "="), *file = strtok(NULL, "=");
        const char *value = strtok(NULL, "=");
        if (!value)
            die("-l", -EINVAL);
        snprintf(procs, sizeof procs, "%s/%d", group, w->number);
        if (mkdir(procs, 0755) < 0 && errno != EEXIST)
            die(procs, -errno);
        snprintf(paths[i], sizeof paths[i], "%s/%d/%s", group, w->number, file);
        snprintf(procs, sizeof procs, "%s/%d/cgroup.procs", group, w->number);
        int fd = open(procs, O_WRONLY | O_CLOEXEC);
        if (fd < 0 || write(fd, "0", 1) < 0)
            die(procs, -errno);
        close(fd);
        w->plan.writes[w->plan.write_count++] = (struct file_write){ paths[i], value };
    }
}

/* As a spawner at its start: what it makes inherits the filter. */
static void confine(void)
{
    if (!options.base_filter)
        return;
    int fd = open(options.base_filter, O_RDONLY | O_CLOEXEC);
    int error = fd < 0 ? -errno : install_filter(fd);
    if (error < 0)
        die(options.base_filter, error);
    close(fd);
}

static void work(int number, int layer, struct table *table, int ready, int go)
{
    static struct worker worker;
    const char *step = "";
    struct worker *w = &worker;

    w->number = number;
    signal(SIGCHLD, SIG_IGN);
    fill_plan(w);
    enter_groups(w);
    w->fds[0] = make_userns(w->plan.uid_base, 65535, w->plan.owner_uid, &step);
    w->fds[1] = w->fds[0] < 0 ? w->fds[0] : make_netns(&step);
    w->fds[2] = layer;
    if (w->fds[1] < 0)
        die(step, w->fds[1]);
    confine();
    int error = enter_host(&w->host, "/proc/self/exe", &step);
    if (error < 0)
        die(step, error);
    char byte = 'r';
    if (write(ready, &byte, 1) != 1 || read(go, &byte, 1) != 1)
        die("start", -EPIPE);
    int total = options.workers * options.count;
    for (int i = 0; i < options.count; i++)
        operate(w, table, number * options.count + i, total);
    exit(0);
}

/* --- all of them -------------------------------------------------------------------------------------- */

static int compare(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

static void print(struct table *table, double seconds)
{
    int total = options.workers * options.count;
    printf("{\"workers\": %d, \"operations\": %d, \"seconds\": %.4f, \"per_second\": %.1f, "
           "\"p50_us\": {", options.workers, total, seconds, total / seconds);
    for (int row = 0; row < table->rows; row++) {
        uint32_t *values = table->ns + row * total;
        qsort(values, (size_t)total, sizeof *values, compare);
        printf("%s\"%s\": %.1f", row ? ", " : "", table->names[row], values[total / 2] / 1000.0);
    }
    printf("}}\n");
}

static void parse(int argc, char **argv)
{
    int option;
    while ((option = getopt(argc, argv, "i:n:c:d:g:x:f:s:b:m:r:l:")) != -1) {
        if (option == 'i')
            options.image = optarg;
        else if (option == 'n')
            options.workers = atoi(optarg);
        else if (option == 'c')
            options.count = atoi(optarg);
        else if (option == 'd')
            options.folder = optarg;
        else if (option == 'g')
            options.cgroup = optarg;
        else if (option == 'x')
            options.command = optarg;
        else if (option == 'f')
            options.base_filter = optarg;
        else if (option == 's')
            options.filter = optarg;
        else if (option == 'b' && options.blob_count < BLOBS_MAX)
            options.blobs[options.blob_count++] = optarg;
        else if (option == 'm' && options.mask_count < LIST_MAX)
            options.masks[options.mask_count++] = optarg;
        else if (option == 'r' && options.read_only_count < LIST_MAX)
            options.read_only[options.read_only_count++] = optarg;
        else if (option == 'l' && options.limit_count < LIST_MAX)
            options.limits[options.limit_count++] = optarg;
        else
            exit(2);
    }
    if (!options.image || !options.cgroup || options.workers < 1 || options.count < 1) {
        fputs("dsec-floor: -i IMAGE and -g CGROUP (a directory of the v2 tree to make)\n", stderr);
        exit(2);
    }
}

static void make_directories(void)
{
    if ((mkdir(options.folder, 0700) < 0 && errno != EEXIST) || mkdir(options.cgroup, 0755) < 0)
        die("mkdir", -errno);
}

static int run_workers(int layer, struct table *table, double *seconds)
{
    int ready[2], go[2], status, failed = 0;
    char byte = 'g';

    if (pipe(ready) < 0 || pipe(go) < 0)
        die("pipe", -errno);
    for (int i = 0; i < options.workers; i++)
        if (fork() == 0) {
            close(ready[0]);
            close(go[1]);
            work(i, layer, table, ready[1], go[0]);
        }
    close(ready[1]);
    close(go[0]);
    for (int i = 0; i < options.workers; i++)
        if (read(ready[0], &byte, 1) != 1)
            failed = 1;
    uint64_t start = now_ns();
    for (int i = 0; i < options.workers && !failed; i++)
        if (write(go[1], &byte, 1) != 1)
            failed = 1;
    close(go[1]); /* a worker that still waits ends */
    while (wait(&status) > 0)
        failed |= status != 0;
    *seconds = (double)(now_ns() - start) / 1e9;
    return failed;
}

int main(int argc, char **argv)
{
    const char *step = "";
    double seconds;

    if (getpid() == 1 && argc == 1)
        return be_init();
    parse(argc, argv);
    signal(SIGPIPE, SIG_IGN);
    size_t size = sizeof(struct table) +
                  sizeof(uint32_t) * ROWS_MAX * (size_t)options.workers * (size_t)options.count;
    struct table *table = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (table == MAP_FAILED)
        die("mmap", -errno);
    int layer = mount_erofs(options.image, options.blobs, options.blob_count, false, &step);
    if (layer < 0)
        die(step, layer);
    make_directories();
    int failed = run_workers(layer, table, &seconds);
    remove_cgroup(AT_FDCWD, options.cgroup);
    remove_tree(AT_FDCWD, options.folder);
    if (!failed)
        print(table, seconds);
    return failed;
}
