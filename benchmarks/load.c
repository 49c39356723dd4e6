/* load: run a command again and again, N at a time, and report how long each took.
 *
 *   load -c CONCURRENCY -n COUNT -s SECONDS [-r LOWER -w WORK [-b BUNDLE_CONFIG]] -e STDERR -- ARGV...
 *
 * Starting commands from Python costs 0.5-1 ms of CPU each, which would be charged to fast peers
 * on a small machine; a vfork here costs 50 us. Every "@ID@" in ARGV becomes a name unique to the
 * operation, every "@ROOT@" the operation's root, every "@BUNDLE@" its directory.
 *
 * With -r, each operation first gets a root of its own: a tmpfs at WORK/<id>, in it an overlay of
 * LOWER with its upper on that tmpfs, mounted at WORK/<id>/rootfs; with -b also a config.json (a
 * link), which makes WORK/<id> an OCI bundle. Both mounts go after the command. This is part of the
 * measured time, as it is part of making a sandbox; containers whose runtime has a storage driver
 * of its own run without -r.
 *
 * Stops after COUNT operations or SECONDS, whichever comes first (each worker finishes what it
 * began and does at least one). Prints a line per operation: worker, start us, end us, exit
 * status (128 + signal for a death by signal).
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MAX_ARGS = 256, MAX_TEXT = 4096, PATH_ROOM = 512 };

struct sample {
    uint32_t worker, status;
    uint64_t start_us, end_us;
};

struct board { /* shared by the workers */
    _Atomic long issued;
    _Atomic long recorded;
    struct sample samples[];
};

struct job {
    long count;
    double seconds;
    const char *lower, *work, *config;
    char **argv;
    int argc, error_fd;
    uint64_t origin_us;
    struct board *board;
};

static uint64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000u;
}

static void fail(const char *what) {
    fprintf(stderr, "load: %s: %s\n", what, strerror(errno));
    exit(111);
}

/* Copy `from` to `to` with every @ID@, @ROOT@ and @BUNDLE@ replaced. */
static void expand(char *to, size_t room, const char *from, const char *id, const char *bundle) {
    char root[PATH_ROOM];
    snprintf(root, sizeof root, "%s/rootfs", bundle);
    const char *names[] = {"@ID@", "@ROOT@", "@BUNDLE@"}, *values[] = {id, root, bundle};
    size_t used = 0;
    while (*from && used + 1 < room) {
        int matched = 0;
        for (int i = 0; i < 3 && !matched; i++) {
            size_t length = strlen(names[i]);
            if (strncmp(from, names[i], length) == 0) {
                int n = snprintf(to + used, room - used, "%s", values[i]);
                used += (size_t)n < room - used ? (size_t)n : room - used - 1;
                from += length;
                matched = 1;
            }
        }
        if (!matched) to[used++] = *from++;
    }
    to[used] = 0;
}

static void make_root(const struct job *job, const char *bundle) {
    char path[PATH_ROOM + 32], options[3 * PATH_ROOM];
    if (mkdir(bundle, 0755)) fail("mkdir of the bundle");
    if (mount("tmpfs", bundle, "tmpfs", 0, "mode=0755")) fail("mount of the upper's tmpfs");
    const char *names[] = {"upper", "work", "rootfs"};
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/%s", bundle, names[i]);
        if (mkdir(path, 0755)) fail("mkdir in the bundle");
    }
    snprintf(options, sizeof options, "lowerdir=%s,upperdir=%s/upper,workdir=%s/work,volatile",
             job->lower, bundle, bundle);
    if (mount("overlay", path, "overlay", 0, options)) fail("mount of the overlay");
    if (job->config) {
        snprintf(path, sizeof path, "%s/config.json", bundle);
        if (symlink(job->config, path)) fail("symlink of the configuration");
    }
}

static void drop_root(const char *bundle) {
    char path[PATH_ROOM + 32];
    snprintf(path, sizeof path, "%s/rootfs", bundle);
    if (umount2(path, MNT_DETACH)) fail("umount of the overlay");
    if (umount2(bundle, MNT_DETACH)) fail("umount of the upper's tmpfs");
    if (rmdir(bundle)) fail("rmdir of the bundle");
}

static uint32_t run_command(const struct job *job, const char *id, const char *bundle) {
    static char texts[MAX_ARGS][MAX_TEXT];
    char *argv[MAX_ARGS + 1];
    for (int i = 0; i < job->argc; i++) {
        argv[i] = job->argv[i];
        if (strchr(job->argv[i], '@')) {
            expand(texts[i], sizeof texts[i], job->argv[i], id, bundle);
            argv[i] = texts[i];
        }
    }
    argv[job->argc] = NULL;
    pid_t pid = vfork();
    if (pid < 0) fail("vfork");
    if (pid == 0) {
        execvp(argv[0], argv);
        _exit(127);
    }
    int status = 0;
    while (waitpid(pid, &status, 0) < 0)
        if (errno != EINTR) fail("waitpid");
    return WIFSIGNALED(status) ? 128u + (uint32_t)WTERMSIG(status) : (uint32_t)WEXITSTATUS(status);
}

static void work(const struct job *job, uint32_t worker) {
    int null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null_fd < 0) fail("open of /dev/null");
    if (dup2(null_fd, 0) < 0 || dup2(null_fd, 1) < 0 || dup2(job->error_fd, 2) < 0) fail("dup2");
    uint64_t deadline = job->origin_us + (uint64_t)(job->seconds * 1e6);
    char id[64], bundle[PATH_ROOM];
    for (int done = 0;; done++) {
        if (done && now_us() >= deadline) return;
        long serial = atomic_fetch_add(&job->board->issued, 1);
        if (serial >= job->count) return;
        uint64_t start = now_us();
        snprintf(id, sizeof id, "b%d-%ld", (int)getppid(), serial);
        snprintf(bundle, sizeof bundle, "%s/%s", job->work ? job->work : "", id);
        if (job->lower) make_root(job, bundle);
        uint32_t status = run_command(job, id, bundle);
        if (job->lower) drop_root(bundle);
        long slot = atomic_fetch_add(&job->board->recorded, 1);
        job->board->samples[slot] =
            (struct sample){worker, status, start - job->origin_us, now_us() - job->origin_us};
    }
}

static void parse(struct job *job, int *workers, int argc, char **argv) {
    const char *errors = "/dev/null";
    int option;
    while ((option = getopt(argc, argv, "+c:n:s:r:w:b:e:")) != -1) {
        switch (option) {
        case 'c': *workers = atoi(optarg); break;
        case 'n': job->count = atol(optarg); break;
        case 's': job->seconds = atof(optarg); break;
        case 'r': job->lower = optarg; break;
        case 'w': job->work = optarg; break;
        case 'b': job->config = optarg; break;
        case 'e': errors = optarg; break;
        default: exit(2);
        }
    }
    job->argv = argv + optind;
    job->argc = argc - optind;
    if (job->argc < 1 || job->argc > MAX_ARGS || *workers < 1 || job->count < 1 ||
        (job->lower && !job->work) || (job->work && strlen(job->work) > PATH_ROOM - 80)) {
        fprintf(stderr, "load: bad arguments; see the top of load.c\n");
        exit(2);
    }
    job->error_fd = open(errors, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (job->error_fd < 0) fail("open of the error file");
}

int main(int argc, char **argv) {
    struct job job = {.count = 1, .seconds = 1e6};
    int workers = 1;
    parse(&job, &workers, argc, argv);
    size_t size = sizeof(struct board) + (size_t)job.count * sizeof(struct sample);
    job.board = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (job.board == MAP_FAILED) fail("mmap");
    /* conmon and the like orphan themselves on purpose: they come to us, and we reap them */
    if (prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)) fail("prctl");
    pid_t pids[1024];
    if (workers > 1024) workers = 1024;
    job.origin_us = now_us();
    for (int i = 0; i < workers; i++) {
        pids[i] = fork();
        if (pids[i] < 0) fail("fork");
        if (pids[i] == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            work(&job, (uint32_t)i);
            _exit(0);
        }
    }
    int left = workers, broken = 0;
    while (left > 0) {
        int status;
        pid_t pid = waitpid(-1, &status, 0);
        if (pid < 0 && errno == ECHILD) break;
        for (int i = 0; i < workers; i++)
            if (pids[i] == pid) {
                left--;
                broken |= status != 0;
            }
    }
    for (long i = 0, n = atomic_load(&job.board->recorded); i < n; i++) {
        const struct sample *s = &job.board->samples[i];
        printf("%u %llu %llu %u\n", s->worker, (unsigned long long)s->start_us,
               (unsigned long long)s->end_us, s->status);
    }
    return broken ? 1 : 0;
}
