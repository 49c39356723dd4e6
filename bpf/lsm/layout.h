/* What the programs for files and the daemon (src/dsecd/host/lsmtable.py) exchange through maps. */
#ifndef DSEC_LSM_LAYOUT_H
#define DSEC_LSM_LAYOUT_H

#include <linux/types.h>

enum { NAME_BYTES = 256, TYPE_BYTES = 64, ABSTRACT_BYTES = 108, PEERS = 16 };

/* Bits of `denial.access`. */
enum {
    READ = 1,
    WRITE = 2,
    EXECUTE = 4,
    SEE = 8,      /* attributes, by stat(2) */
    REPLACE = 16, /* to rename it, to remove it, to mount on it: a rule is about something below */
    CONNECT = 32, /* to a unix socket */
    EVERYTHING = 63,
};

/* What is denied at a place. */
struct denial {
    __u64 mounts; /* types of file systems: bits by `mount_types`, the first for all others */
    __u32 access;
    __u32 reserved;
};

/* A place in the tree of names that a policy is about, and all below it that is no place itself. */
struct node {
    struct denial here, below;
    __u32 number; /* in `name_key` of places below */
    __u32 has_places;
};

struct name_key {
    __u64 cgroup;
    __u32 node;
    char name[NAME_BYTES]; /* padded with NUL */
    __u32 reserved;
};

/* Of a file system in a sandbox, by the number of its device. */
struct root_key {
    __u64 cgroup;
    __u32 device;
    __u32 reserved;
};

enum {
    BOUND_HOLDS = 1,          /* a rule is about places, so the root stays what it is */
    BOUND_ABSTRACT_DENY = 2,  /* abstract names of unix sockets that `abstracts` lacks */
    BOUND_VSOCK_DENY = 4,     /* AF_VSOCK peers that no rule is about */
};

/* A rule on AF_VSOCK; the first that fits decides. */
struct peer {
    __u32 any_cid, cid, first_port, last_port, deny;
};

/* Of a sandbox, by the id of its cgroup. */
struct binding {
    struct denial own;     /* in file systems that the sandbox has mounted */
    struct denial foreign; /* in those without a place in it: memfd and the like */
    __u32 flags;
    __u32 peers;
    struct peer peer[PEERS];
};

struct type_key {
    __u64 cgroup;
    char type[TYPE_BYTES];
};

struct abstract_key {
    __u64 cgroup;
    __u32 length;
    char name[ABSTRACT_BYTES];
};

#endif
