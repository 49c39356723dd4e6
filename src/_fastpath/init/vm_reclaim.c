/* Proactive reclaim in a machine: the kernel's DAMON finds memory that nobody has used for a while. Pages of
 * files are dropped, anonymous ones compressed into a swap that lies in the machine's own memory; what became
 * free goes back to the host by free page reporting.
 *
 * Not by the module damon_reclaim: that of Linux 6.12 commits a context without schemes over its own
 * (damon_reclaim_apply_parameters), and so looks and never reclaims. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/swap.h>
#include <unistd.h>

#include "vm.h"

#define DAMON "/sys/kernel/mm/damon/admin/kdamonds"
#define ZRAM_SIZE "/sys/block/zram0/disksize"
#define ZRAM "/dev/zram0"
#define REPORTED "/sys/module/page_reporting/parameters/page_reporting_order"
#define REPORTED_ORDER 3 /* 32 KiB: by default 2 MiB, of which few are free after single pages were taken */

#define LOOK_MS 200ull /* often enough to tell what is cold, seldom enough for a machine that idles */
#define ROUND_MS 2000ull
#define RANGES_MAX 8
#define RANGE_LEAST (1u << 20) /* what the firmware leaves below is not worth a region */

struct range {
    unsigned long long start, end;
};

__attribute__((format(printf, 2, 3))) static int set(const char *path, const char *format, ...)
{
    char text[32];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return vm_write_text(path, text);
}

/* --- swap --------------------------------------------------------------------------------- */

/* What mkswap(8) writes: include/linux/swap.h, union swap_header. */
static int write_swap_header(int fd, uint64_t size, unsigned long page)
{
    union {
        struct {
            char boot[1024];
            uint32_t version, last_page, bad_pages;
        } info;
        char bytes[4096];
    } header = { .info = { .version = 1, .last_page = (uint32_t)(size / page - 1) } };
    memcpy(header.bytes + sizeof header - 10, "SWAPSPACE2", 10);
    return pwrite(fd, &header, sizeof header, 0) == (ssize_t)sizeof header ? 0 : -errno;
}

static int swap_start(uint64_t size)
{
    unsigned long page = (unsigned long)sysconf(_SC_PAGESIZE);
    int error = set(ZRAM_SIZE, "%llu", (unsigned long long)size);
    if (error)
        return error;
    int fd = open(ZRAM, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    error = write_swap_header(fd, size, page);
    close(fd);
    if (!error && swapon(ZRAM, 0) < 0)
        error = -errno;
    return error;
}

/* --- DAMON -------------------------------------------------------------------------------- */

/* Returns how many ranges of memory there are, or -errno. */
static int find_memory(struct range ranges[RANGES_MAX])
{
    FILE *file = fopen("/proc/iomem", "re");
    if (!file)
        return -errno;
    int n = 0;
    char line[128];
    while (n < RANGES_MAX && fgets(line, sizeof line, file)) {
        struct range *next = &ranges[n];
        if (line[0] != ' ' && strstr(line, " : System RAM") &&
            sscanf(line, "%llx-%llx", &next->start, &next->end) == 2 &&
            next->end++ - next->start >= RANGE_LEAST)
            n++;
    }
    fclose(file);
    return n ? n : -ENODATA;
}

static int set_ranges(void)
{
    struct range ranges[RANGES_MAX];
    int n = find_memory(ranges);
    if (n < 0)
        return n;
    int error = set("targets/0/regions/nr_regions", "%d", n);
    for (int i = 0; !error && i < n; i++) {
        char path[64];
        snprintf(path, sizeof path, "targets/0/regions/%d/start", i);
        error = set(path, "%llu", ranges[i].start);
        snprintf(path, sizeof path, "targets/0/regions/%d/end", i);
        if (!error)
            error = set(path, "%llu", ranges[i].end);
    }
    return error;
}

/* In the directory of the context: which memory is looked at and how often, and what is done with it. */
static int set_context(uint32_t min_age_s)
{
    const struct {
        const char *path;
        uint64_t value;
    } settings[] = {
        { "monitoring_attrs/intervals/sample_us", LOOK_MS * 1000 },
        { "monitoring_attrs/intervals/aggr_us", ROUND_MS * 1000 },
        { "monitoring_attrs/nr_regions/min", 100 }, /* a page in use keeps all of its region */
        { "monitoring_attrs/nr_regions/max", 400 },
        { "targets/nr_targets", 1 },
        { "schemes/nr_schemes", 1 },
        { "schemes/0/access_pattern/sz/min", 4096 },
        { "schemes/0/access_pattern/sz/max", UINT64_MAX },
        { "schemes/0/access_pattern/nr_accesses/max", 0 },
        { "schemes/0/access_pattern/age/min", (min_age_s * 1000ull + ROUND_MS - 1) / ROUND_MS },
        { "schemes/0/access_pattern/age/max", UINT_MAX },
        /* looked at each second, what is free included; a bound in time would be one of a busy host's time */
        { "schemes/0/quotas/bytes", 64u << 20 },
        { "schemes/0/quotas/reset_interval_ms", 1000 },
        { "schemes/0/quotas/weights/age_permil", 1000 },
    };
    int error = vm_write_text("operations", "paddr");
    for (size_t i = 0; !error && i < sizeof settings / sizeof *settings; i++)
        error = set(settings[i].path, "%llu", (unsigned long long)settings[i].value);
    if (!error)
        error = vm_write_text("schemes/0/action", "pageout");
    return error ? error : set_ranges();
}

static int damon_start(uint32_t min_age_s)
{
    int error = chdir(DAMON) < 0 ? -errno : vm_write_text("nr_kdamonds", "1");
    if (!error)
        error = vm_write_text("0/contexts/nr_contexts", "1");
    if (!error && chdir("0/contexts/0") < 0)
        error = -errno;
    if (!error)
        error = set_context(min_age_s);
    if (!error)
        error = vm_write_text("../../state", "on");
    return chdir("/") < 0 && !error ? -errno : error;
}

int vm_reclaim_start(uint32_t min_age_s, uint64_t swap_bytes)
{
    int error = set(REPORTED, "%d", REPORTED_ORDER);
    if (!error && swap_bytes)
        error = swap_start(swap_bytes);
    return error ? error : damon_start(min_age_s);
}
