/* The rules at a place, shared by all programs.
 *
 * A place is a file system and a path from its root, made of the names of directory entries. So it
 * is the same through bind mounts, chroot, /proc/self/root and descriptors, and stays the same when
 * overlayfs copies a file up, or its inode is dropped from memory and read again.
 */
#ifndef DSEC_LSM_DECIDE_H
#define DSEC_LSM_DECIDE_H

#include "maps.h"

#define MAX_DEPTH 512 /* of directories; what lies deeper is denied */

/* The binding of the sandbox whose process runs, NULL for everybody else.
 *
 * Not for what is done with the rights of the host's user namespace: that is dsec-init, and what
 * overlayfs does in the layers below, on behalf of a process that was judged at the top.
 */
static __always_inline const struct binding *bound(__u64 *cgroup)
{
    struct task_struct *task = bpf_get_current_task_btf();
    if (!task->cred->user_ns->level)
        return NULL;
    *cgroup = bpf_get_current_ancestor_cgroup_id(sandbox_level);
    return bpf_map_lookup_elem(&bindings, cgroup);
}

static __always_inline const struct dentry *parent_of(const struct dentry *dentry)
{
    return BPF_CORE_READ(dentry, d_parent);
}

/* The loader of a light skeleton has room for 32 programs and functions (gen_loader.c of libbpf); so
 * there are few of the latter. */
struct ascent {
    const struct dentry *at;
    __u32 depth;
    __u32 reached;
};

static long climb(__u32 index, struct ascent *a)
{
    const struct dentry *parent = parent_of(a->at);
    a->reached = parent == a->at;
    if (a->reached)
        return 1;
    a->at = parent;
    a->depth++;
    return 0;
}

struct descent {
    const struct dentry *from;
    const struct dentry *at;
    __u32 depth;
    __u32 failed;
    struct node node; /* of `at` */
    struct name_key key;
};

static __always_inline int read_name(char *to, const struct dentry *dentry)
{
    __u32 length = BPF_CORE_READ(dentry, d_name.len);
    const unsigned char *name = BPF_CORE_READ(dentry, d_name.name);
    __builtin_memset(to, 0, NAME_BYTES);
    if (length >= NAME_BYTES)
        return 1; /* no rule has such a name */
    asm volatile("" : "+r"(length));
    return bpf_probe_read_kernel(to, length & (NAME_BYTES - 1), name) == 0;
}

static long descend(__u32 index, struct descent *d)
{
    if (!d->node.has_places)
        return 1;
    struct ascent a = { .at = d->from };
    bpf_loop(d->depth - 1 - index, climb, &a, 0);
    const struct dentry *next = a.at;
    /* if somebody renames just now, the path must not be put together from two */
    d->failed = next == d->at || parent_of(next) != d->at || !read_name(d->key.name, next);
    if (d->failed)
        return 1;
    d->key.node = d->node.number;
    const struct node *node = bpf_map_lookup_elem(&names, &d->key);
    if (!node)
        return 1;
    d->node = *node;
    d->at = next;
    return 0;
}

/* Find what is denied at a directory entry. A function for the verifier, which checks a global one
 * once, and with its address as a number: for a pointer it takes five times as long.
 */
__noinline int dsec_find(__u64 entry, __u64 cgroup, const struct binding *b, struct denial *found)
{
    if (!b || !found)
        return 0;
    const struct dentry *dentry = (const struct dentry *)entry;
    struct super_block *file_system = BPF_CORE_READ(dentry, d_sb);
    struct root_key key = { .cgroup = cgroup, .device = BPF_CORE_READ(file_system, s_dev) };
    const struct node *root = bpf_map_lookup_elem(&roots, &key);
    if (!root) {
        *found = BPF_CORE_READ(file_system, s_user_ns, level) ? b->own : b->foreign;
        return 0;
    }
    struct ascent a = { .at = dentry };
    bpf_loop(MAX_DEPTH + 1, climb, &a, 0);
    struct descent d = { .from = dentry, .at = a.at, .depth = a.depth, .node = *root,
                         .key = { .cgroup = cgroup } };
    d.failed = !a.reached || a.at != BPF_CORE_READ(file_system, s_root);
    if (!d.failed)
        bpf_loop(d.depth, descend, &d, 0);
    *found = d.at == dentry ? d.node.here : d.node.below;
    if (d.failed)
        *found = (struct denial){ .access = EVERYTHING, .mounts = ~0ULL };
    return 0;
}

static __always_inline void find(const struct binding *b, __u64 cgroup, const struct dentry *dentry,
                                 struct denial *found)
{
    __u64 entry = 0;
    bpf_probe_read_kernel(&entry, sizeof entry, &dentry);
    dsec_find(entry, cgroup, b, found);
}

/* Return it as the hooks do. A compiler that computes it without a branch loses the verifier, which
 * wants to see that it is an error number. */
static __always_inline int verdict(__u64 denied)
{
    if (!denied)
        return 0;
    asm volatile("");
    return -EACCES;
}

/* Judge what the running process wants at `dentry`. */
static __always_inline int judge(const struct dentry *dentry, __u32 wanted)
{
    __u64 cgroup;
    const struct binding *b = bound(&cgroup);
    if (!b)
        return 0;
    struct denial denied = {};
    find(b, cgroup, dentry, &denied);
    return verdict(denied.access & wanted);
}

#endif
