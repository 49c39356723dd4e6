/* What is created, removed, renamed and changed. Hooks of inodes, not of paths: these are asked, too,
 * when a file system that the sandbox itself has stacked on others changes them.
 */
#include "decide.h"

struct mnt_idmap;

SEC("lsm/inode_create")
int BPF_PROG(dsec_inode_create, struct inode *in, struct dentry *dentry)
{
    return judge(dentry, WRITE);
}

SEC("lsm/inode_mkdir")
int BPF_PROG(dsec_inode_mkdir, struct inode *in, struct dentry *dentry)
{
    return judge(dentry, WRITE);
}

SEC("lsm/inode_mknod")
int BPF_PROG(dsec_inode_mknod, struct inode *in, struct dentry *dentry)
{
    return judge(dentry, WRITE);
}

SEC("lsm/inode_symlink")
int BPF_PROG(dsec_inode_symlink, struct inode *in, struct dentry *dentry)
{
    return judge(dentry, WRITE);
}

SEC("lsm/inode_unlink")
int BPF_PROG(dsec_inode_unlink, struct inode *in, struct dentry *dentry)
{
    return judge(dentry, WRITE | REPLACE);
}

SEC("lsm/inode_rmdir")
int BPF_PROG(dsec_inode_rmdir, struct inode *in, struct dentry *dentry)
{
    return judge(dentry, WRITE | REPLACE);
}

/* Under the new name the file must not be open to more than under the old one. */
SEC("lsm/inode_link")
int BPF_PROG(dsec_inode_link, struct dentry *from, struct inode *in, struct dentry *to)
{
    __u64 cgroup;
    const struct binding *b = bound(&cgroup);
    if (!b)
        return 0;
    struct denial denied = {};
    find(b, cgroup, from, &denied);
    __u32 before = denied.access & ~REPLACE;
    find(b, cgroup, to, &denied);
    return verdict(denied.access & WRITE || before & ~denied.access);
}

/* The kernel asks twice for an exchange, with the ends swapped (security_inode_rename). What cannot
 * be read, or connected to, cannot be carried to where it can. */
SEC("lsm/inode_rename")
int BPF_PROG(dsec_inode_rename, struct inode *from_in, struct dentry *from, struct inode *to_in,
             struct dentry *to)
{
    __u64 cgroup;
    const struct binding *b = bound(&cgroup);
    if (!b)
        return 0;
    struct denial denied = {};
    find(b, cgroup, from, &denied);
    __u32 before = denied.access & (READ | WRITE | REPLACE | CONNECT);
    find(b, cgroup, to, &denied);
    return verdict(before || denied.access & (WRITE | (to->d_inode ? REPLACE : 0)));
}

/* Mode, owner, times, length. The verifier refuses this program where the entry is another argument
 * (before Linux 6.9): the field is read through the argument's own type. */
SEC("lsm/inode_setattr")
int BPF_PROG(dsec_inode_setattr, struct mnt_idmap *map, struct dentry *dentry)
{
    return dentry->d_sb ? judge(dentry, WRITE) : 0;
}

SEC("lsm/inode_setxattr")
int BPF_PROG(dsec_inode_setxattr, struct mnt_idmap *map, struct dentry *dentry)
{
    return dentry->d_sb ? judge(dentry, WRITE) : 0;
}

SEC("lsm/inode_removexattr")
int BPF_PROG(dsec_inode_removexattr, struct mnt_idmap *map, struct dentry *dentry)
{
    return dentry->d_sb ? judge(dentry, WRITE) : 0;
}

SEC("lsm/inode_set_acl")
int BPF_PROG(dsec_inode_set_acl, struct mnt_idmap *map, struct dentry *dentry)
{
    return dentry->d_sb ? judge(dentry, WRITE) : 0;
}

SEC("lsm/inode_remove_acl")
int BPF_PROG(dsec_inode_remove_acl, struct mnt_idmap *map, struct dentry *dentry)
{
    return dentry->d_sb ? judge(dentry, WRITE) : 0;
}
