/* What the programs read of the kernel's structures; the loader puts in the offsets of this kernel. */
#ifndef DSEC_LSM_KERNEL_H
#define DSEC_LSM_KERNEL_H

#include <linux/types.h>

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct user_namespace {
    int level; /* 0: the host's */
};

struct cred {
    struct user_namespace *user_ns;
};

struct task_struct {
    const struct cred *cred;
};

struct file_system_type {
    const char *name;
};

struct super_block {
    __u32 s_dev;
    struct dentry *s_root;
    struct user_namespace *s_user_ns; /* of who mounted it */
    struct file_system_type *s_type;
};

struct qstr {
    union {
        struct {
            __u32 hash, len;
        };
    };
    const unsigned char *name;
};

struct dentry {
    struct dentry *d_parent; /* itself at the root */
    struct qstr d_name;
    struct inode *d_inode;
    struct super_block *d_sb;
};

struct path {
    struct dentry *dentry;
};

struct file {
    unsigned int f_mode, f_flags;
    struct path f_path;
};

struct sock_common {
    unsigned short skc_family;
};

struct sock {
    struct sock_common __sk_common;
};

struct socket {
    struct sock *sk;
};

struct sockaddr_un {
    unsigned short sun_family;
    char sun_path[108];
};

struct unix_address {
    int len;
    struct sockaddr_un name[];
};

struct unix_sock {
    struct unix_address *addr;
    struct path path;
};

struct msghdr {
    void *msg_name;
};

#pragma clang attribute pop

#endif
