#include "confine.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "child.h"
#include "config.h"

#ifndef SYS_landlock_create_ruleset
#define SYS_landlock_create_ruleset 444
#define SYS_landlock_add_rule 445
#define SYS_landlock_restrict_self 446
#endif

/* include/uapi/linux/landlock.h */
#define RULE_PATH_BENEATH 1
#define ACCESS_OF_FILES (1u << 0 | 1u << 1 | 1u << 2 | 1u << 14 | 1u << 15)
struct path_beneath {
    uint64_t access;
    int32_t parent;
} __attribute__((packed));

/* Through no symbolic link: the sandbox could make one, and have what it likes opened by it. */
static int open_path(struct mp_bytes path)
{
    struct {
        uint64_t flags, mode, resolve;
    } how = { .flags = O_PATH | O_CLOEXEC, .resolve = 0x04 /* RESOLVE_NO_SYMLINKS */ };
    char text[MAX_PATH];
    memcpy(text, path.p, path.n);
    text[path.n] = 0;
    return (int)syscall(SYS_openat2, AT_FDCWD, text, &how, sizeof how);
}

/* The kernel refuses what concerns directories on anything else. */
static uint64_t fitting(int fd, uint64_t access)
{
    struct stat st;
    return fstat(fd, &st) == 0 && !S_ISDIR(st.st_mode) ? access & ACCESS_OF_FILES : access;
}

static void allow(int ruleset, struct mp_bytes path, uint64_t access)
{
    int fd = open_path(path);
    if (fd < 0) {
        if (errno == ENOENT || errno == ENOTDIR || errno == ELOOP || errno == EACCES)
            return; /* nothing there now: there is nothing to open for this command */
        child_fail_errno(errno, "cannot open a path of the policy", path);
    }
    struct path_beneath rule = { .access = fitting(fd, access), .parent = fd };
    if (rule.access && syscall(SYS_landlock_add_rule, ruleset, RULE_PATH_BENEATH, &rule, 0) < 0)
        child_fail_errno(errno, "cannot apply the policy to", path);
    close(fd);
}

void confine_files(void)
{
    struct mp_reader r = mp_reader_of(config.landlock.p, config.landlock.n);
    if (!config.landlock.n)
        return;
    mp_get_array(&r);
    uint64_t handled = mp_get_u64(&r);
    int ruleset = (int)syscall(SYS_landlock_create_ruleset, &handled, sizeof handled, 0);
    if (ruleset < 0)
        child_fail(INTERNAL, "cannot make a Landlock ruleset: %s", strerror(errno));
    for (uint32_t left = mp_get_array(&r); left; left--) {
        mp_get_array(&r);
        struct mp_bytes path = mp_get_bytes(&r);
        allow(ruleset, path, mp_get_u64(&r));
    }
    if (syscall(SYS_landlock_restrict_self, ruleset, 0) < 0)
        child_fail(INTERNAL, "cannot apply the Landlock ruleset: %s", strerror(errno));
    close(ruleset);
}
