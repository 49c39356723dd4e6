/* dsec-blobd: serves the chunks of blobs, brought from a store when they are read.
 *
 *     dsec-blobd --fuse-fd N --control PATH --state DIR --cache DIR [--connection M] [--take-over]
 *                [--group-fd N --slots-fd N]
 *
 * N: open /dev/fuse of a mounted connection; M: its number below /sys/fs/fuse/connections. PATH: the
 * control socket (control.h). DIR of the state: what must survive this process, on a file system that
 * need not survive the machine. --take-over: another process served the connection before. Group and
 * slots: a fanotify group and memory for preaccess.c.
 *
 * Two processes. The keeper holds the descriptors and does nothing but start the worker, and start it
 * again when it dies: the kernel keeps what the dead one had taken, and the new one asks for it again.
 * So reads survive a crash even while dsecd is away. Without FUSE_NOTIFY_RESEND (Linux 6.9) they could
 * only hang: then the connection is aborted, and all of its readers get an error.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <curl/curl.h>

#include "blobd/control.h"
#include "blobd/fetch.h"
#include "blobd/fuse.h"
#include "blobd/log.h"
#include "blobd/preaccess.h"
#include "native/kernel.h"

#define FUSE_THREADS 4
#define DESCRIPTORS 1024
#define RESTART_MS 5
#define RESTART_MAX_MS 1000
#define STABLE_NS 1000000000ull /* a worker that lived this long starts the delays anew */

struct options {
    int fuse;
    const char *control, *state, *cache;
    const char *connection;
    bool take_over; /* another process served this connection before */
    bool resend;    /* false: behave as on a kernel without FUSE_NOTIFY_RESEND */
    int group, slots; /* of preaccess.c, or -1 */
};

static bool read_options(int argc, char **argv, struct options *options)
{
    *options = (struct options){ .fuse = -1, .resend = true, .group = -1, .slots = -1 };
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(argv[i], "--no-resend") == 0) {
            options->resend = false;
            continue;
        }
        if (strcmp(argv[i], "--take-over") == 0) {
            options->take_over = true;
            continue;
        }
        if (!value)
            return false;
        if (strcmp(argv[i], "--fuse-fd") == 0)
            options->fuse = atoi(value);
        else if (strcmp(argv[i], "--group-fd") == 0)
            options->group = atoi(value);
        else if (strcmp(argv[i], "--slots-fd") == 0)
            options->slots = atoi(value);
        else if (strcmp(argv[i], "--control") == 0)
            options->control = value;
        else if (strcmp(argv[i], "--state") == 0)
            options->state = value;
        else if (strcmp(argv[i], "--cache") == 0)
            options->cache = value;
        else if (strcmp(argv[i], "--connection") == 0)
            options->connection = value;
        else
            return false;
        i++;
    }
    return options->fuse > 2 && options->control && options->state && options->cache;
}

/* What a fault in the worker could use. Files of stores may belong to others; nothing else is needed. */
static void drop_privileges(void)
{
    struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
    struct __user_cap_data_struct sets[2] = { { 0 } };
    uint32_t kept = 1u << CAP_DAC_READ_SEARCH;

    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    sets[0].effective = sets[0].permitted = kept;
    if (syscall(SYS_capset, &header, sets) < 0)
        log_line(LOG_WARNING, "capabilities are kept", NULL, "%s", strerror(errno));
}

static void raise_limits(void)
{
    struct rlimit files;

    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, "-900", 4) != 4)
        log_line(LOG_INFO, "oom_score_adj is as before", NULL, "%s", strerror(errno));
    if (fd >= 0)
        close(fd);
}

/* The control file system, mounted for this process alone: the host need not have it at /sys/fs/fuse. */
static int open_abort(const char *connection)
{
    char path[64];
    int error = -1, files = -1, fs = k_fsopen("fusectl");

    if (fs >= 0 && k_fsconfig(fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0) == 0)
        files = k_fsmount(fs, 0);
    snprintf(path, sizeof path, "%s/abort", connection ? connection : "none");
    if (files >= 0)
        error = openat(files, path, O_WRONLY | O_CLOEXEC);
    if (files >= 0)
        close(files);
    if (fs >= 0)
        close(fs);
    return error;
}

static void abort_connection(const char *connection)
{
    int fd = open_abort(connection);

    if (fd < 0 || write(fd, "1", 1) != 1)
        log_line(LOG_ERROR, "cannot abort the connection: reads of the dead process hang", NULL, NULL);
    else
        log_line(LOG_ERROR, "the connection was aborted: this kernel cannot resend requests", NULL, NULL);
    if (fd >= 0)
        close(fd);
}

/* Ask for what a dead worker had taken, of this keeper or of another one. The first worker asks too:
 * nothing comes back, and it learns whether the kernel knows the question. */
static void take_over(const struct options *options)
{
    int error = options->resend ? fuse_resend(options->fuse) : -EINVAL;

    service.resend = error != -EINVAL;
    if (error == -EINVAL && options->take_over)
        abort_connection(options->connection);
    else if (error && error != -EINVAL)
        log_line(LOG_WARNING, "cannot ask for requests again", NULL, "%s", strerror(-error));
}

/* A table of descriptors that grows while there are threads waits for an RCU grace period, some 10 ms
 * (expand_fdtable in fs/file.c): make it large before. */
static void widen_descriptors(int fd)
{
    int high = fcntl(fd, F_DUPFD_CLOEXEC, DESCRIPTORS - 1);

    if (high >= 0)
        close(high);
}

static void work(const struct options *options, int listener, pid_t keeper)
{
    prctl(PR_SET_NAME, "dsec-blobd");
    widen_descriptors(options->fuse);
    service = (struct service){ .fuse = options->fuse, .group = options->group, .slots = options->slots,
                                .keeper = keeper, .resend = options->resend };
    int error = options->group < 0 ? 0 : preaccess_open(options->group, options->slots);
    if (error) {
        log_line(LOG_ERROR, "cannot use the fanotify group", NULL, "%s", strerror(-error));
        _exit(2);
    }
    service.state = open(options->state, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    error = service.state < 0 ? -errno : cache_open(options->cache);
    if (error) {
        log_line(LOG_ERROR, "cannot open the directories", NULL, "%s", strerror(-error));
        _exit(2);
    }
    take_over(options); /* what comes back waits in the kernel until fuse_start */
    drop_privileges();
    curl_global_init(CURL_GLOBAL_DEFAULT);
    if (!fetch_start(DEMAND_THREADS, PREFETCH_THREADS)) {
        log_line(LOG_ERROR, "cannot start the fetch threads", NULL, NULL);
        _exit(2);
    }
    state_restore();
    if (!fuse_start(options->fuse, FUSE_THREADS)) {
        log_line(LOG_ERROR, "cannot start the threads of the connection", NULL, NULL);
        _exit(2);
    }
    if (preaccess_enabled() && !preaccess_start()) {
        log_line(LOG_ERROR, "cannot start the threads of the fanotify group", NULL, NULL);
        _exit(2);
    }
    log_line(LOG_INFO, "serving", NULL, "%zu blobs", cache_count());
    control_serve(listener);
    _exit(0);
}

static volatile sig_atomic_t worker;

static void pass_on(int number)
{
    if (worker > 0)
        kill(worker, number);
    _exit(0);
}

static void sleep_ms(unsigned ms)
{
    nanosleep(&(struct timespec){ .tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000 }, NULL);
}

static int keep(struct options *options, int listener)
{
    unsigned delay = RESTART_MS;
    pid_t keeper = getpid();
    sigset_t ends;
    int status = 0;

    sigemptyset(&ends);
    sigaddset(&ends, SIGTERM);
    sigaddset(&ends, SIGINT);
    signal(SIGTERM, pass_on);
    signal(SIGINT, pass_on);
    for (;;) {
        uint64_t start = now_ns();
        sigprocmask(SIG_BLOCK, &ends, NULL); /* not between the fork and the note of its pid */
        pid_t pid = fork();
        if (pid == 0) {
            signal(SIGTERM, SIG_DFL);
            signal(SIGINT, SIG_DFL);
            sigprocmask(SIG_UNBLOCK, &ends, NULL);
            work(options, listener, keeper);
        }
        worker = pid;
        sigprocmask(SIG_UNBLOCK, &ends, NULL);
        while (pid > 0 && waitpid(pid, &status, 0) < 0 && errno == EINTR)
            ;
        worker = 0;
        if (pid > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0)
            return 0;
        if (pid > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 2)
            return 2; /* it cannot start: again would not help */
        delay = now_ns() - start > STABLE_NS ? RESTART_MS : delay;
        log_line(LOG_ERROR, "the worker died", NULL, "status %d; again in %u ms", status, delay);
        options->take_over = true;
        sleep_ms(delay);
        delay = 2 * delay < RESTART_MAX_MS ? 2 * delay : RESTART_MAX_MS;
    }
}

int main(int argc, char **argv)
{
    struct options options;

    if (!read_options(argc, argv, &options)) {
        fputs("usage: dsec-blobd --fuse-fd N --control PATH --state DIR --cache DIR"
              " [--connection M] [--take-over] [--no-resend] [--group-fd N --slots-fd N]\n", stderr);
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    for (int i = 0; i < 3; i++)
        fcntl((int[]){ options.fuse, options.group, options.slots }[i], F_SETFD, FD_CLOEXEC);
    raise_limits();
    int listener = control_listen(options.control);
    if (listener < 0) {
        log_line(LOG_ERROR, "cannot listen", NULL, "%s: %s", options.control, strerror(-listener));
        return 2;
    }
    prctl(PR_SET_NAME, "dsec-blobd-keep");
    return keep(&options, listener);
}
