/* What is mounted. A mount replaces what is at its place, and all below. */
#include "decide.h"

#define MS_REMOUNT_ 32
#define MS_BIND_ 4096
#define MS_MOVE_ 8192
#define MS_PROPAGATION_ (1 << 17 | 1 << 18 | 1 << 19 | 1 << 20)

static __always_inline __u64 bit_of(const struct type_key *key)
{
    const __u32 *bit = bpf_map_lookup_elem(&mount_types, key);
    return 1ULL << (bit ? *bit & 63 : 0);
}

/* The bits of a type. "fuse.sshfs" is a fuse, and the kernel looks at no more. */
static __noinline __u64 bits_of(__u64 cgroup, const char *type)
{
    struct type_key key = { .cgroup = cgroup };
    bpf_probe_read_kernel_str(key.type, sizeof key.type, type);
    __u64 bits = bit_of(&key);
    int subtype = 0;
#pragma clang loop unroll(disable)
    for (int i = 0; i < TYPE_BYTES; i++) {
        subtype |= key.type[i] == '.';
        if (subtype)
            key.type[i] = 0;
    }
    return subtype ? bits | bit_of(&key) : bits;
}

static __always_inline int judge_mount(const struct binding *b, __u64 cgroup,
                                       const struct dentry *at, __u64 bits)
{
    struct denial denied = {};
    find(b, cgroup, at, &denied);
    return verdict(denied.access & (WRITE | REPLACE) || denied.mounts & bits);
}

static const char bind[] = "bind";

SEC("lsm/sb_mount")
int BPF_PROG(dsec_sb_mount, const char *source, const struct path *path, const char *type,
             unsigned long flags)
{
    __u64 cgroup;
    const struct binding *b = bound(&cgroup);
    /* in the order of path_mount() */
    if (!b || flags & MS_REMOUNT_ || (!(flags & MS_BIND_) && flags & MS_PROPAGATION_))
        return 0;
    __u64 bits = bits_of(cgroup, flags & (MS_BIND_ | MS_MOVE_) ? bind : type);
    return judge_mount(b, cgroup, path->dentry, bits);
}

/* A file system of the sandbox's own is judged by its type, wherever it was mounted before; what the
 * host has given it can only be a bind. */
SEC("lsm/move_mount")
int BPF_PROG(dsec_move_mount, const struct path *from, const struct path *to)
{
    __u64 cgroup;
    const struct binding *b = bound(&cgroup);
    if (!b)
        return 0;
    struct super_block *file_system = from->dentry->d_sb;
    int own = file_system->s_user_ns->level;
    __u64 bits = bits_of(cgroup, own ? file_system->s_type->name : bind);
    return judge_mount(b, cgroup, to->dentry, bits);
}

SEC("lsm/sb_pivotroot")
int BPF_PROG(dsec_sb_pivotroot, const struct path *old, const struct path *new)
{
    __u64 cgroup;
    const struct binding *b = bound(&cgroup);
    return verdict(b && b->flags & BOUND_HOLDS);
}
