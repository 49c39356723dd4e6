/* What is read, executed and looked at. */
#include "decide.h"

#define FMODE_READ_ 1
#define FMODE_WRITE_ 2
#define FMODE_EXEC_ 0x20 /* of f_flags; open(2) cannot set it */
#define PROT_EXEC_ 4

/* Also when a descriptor is opened again through /proc, and for interpreters that execve(2) opens. */
SEC("lsm/file_open")
int BPF_PROG(dsec_file_open, struct file *file)
{
    __u32 wanted = file->f_mode & FMODE_WRITE_ ? WRITE : 0;
    if (file->f_flags & FMODE_EXEC_)
        wanted |= EXECUTE;
    else if (file->f_mode & FMODE_READ_)
        wanted |= READ;
    return judge(file->f_path.dentry, wanted);
}

/* A program given to its dynamic loader as an argument is not executed but mapped. */
SEC("lsm/mmap_file")
int BPF_PROG(dsec_mmap_file, struct file *file, unsigned long asked, unsigned long protection)
{
    if (!file || !(protection & PROT_EXEC_))
        return 0;
    return judge(file->f_path.dentry, EXECUTE);
}

SEC("lsm/inode_getattr")
int BPF_PROG(dsec_inode_getattr, const struct path *path)
{
    return judge(path->dentry, SEE);
}

SEC("lsm/inode_readlink")
int BPF_PROG(dsec_inode_readlink, struct dentry *dentry)
{
    return judge(dentry, READ);
}

SEC("lsm/inode_getxattr")
int BPF_PROG(dsec_inode_getxattr, struct dentry *dentry)
{
    return judge(dentry, READ);
}
