/* What the spawner hands over: descriptors by number, and one msgpack map on fd 4. */
#ifndef DSEC_CONFIG_H
#define DSEC_CONFIG_H

#include "../wire/msgpack.h"

enum {
    FD_LISTEN = 3,
    FD_CONFIG = 4,
    FD_SPOOL = 5,
    FD_CGROUP = 6,
    FD_USERNS = 7,
    FD_MNTNS = 8,
    FD_IPCNS = 9,
    FD_UTSNS = 10,
    FD_CGROUPNS = 11,
    FD_UPPER = 12,
    FD_SHELL = 13,
    FD_FIRST_FREE = 14,
};

struct config {
    struct mp_bytes env; /* a msgpack map, still encoded */
    struct mp_bytes user; /* "" is root */
    struct mp_bytes workdir; /* "" is the user's home */
    struct mp_bytes seccomp; /* struct sock_filter[] */
    struct mp_bytes landlock; /* [accesses handled, [[path, accesses], ...]], still encoded; none: n is 0 */
    struct mp_bytes sandbox;
    struct mp_bytes apparmor; /* profile of commands; "" is none */
    uint64_t caps;
    uint64_t output_limit, spool_limit;
    uint64_t nofile; /* 0 leaves the inherited limit */
    int oom_score_adj;
    bool no_new_privs;
    bool any_peer; /* --any-peer: answer processes of our own PID namespace too (tests, VMs) */
    bool has_cgroup, has_spool, has_upper, has_shell;
};

extern struct config config;

/* Read `fd` to its end and keep the text for the life of the process; NULL or what is wrong. */
const char *config_read(int fd);
/* Parse a configuration that must outlive the process's use of it; NULL or what is wrong. */
const char *config_parse(struct mp_bytes text);

#endif
