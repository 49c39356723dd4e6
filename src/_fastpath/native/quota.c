#include "native/quota.h"

#include <linux/fs.h>
#include <linux/quota.h>
#include <sys/ioctl.h>

#include "native/kernel.h"

#ifndef SYS_quotactl_fd
#define SYS_quotactl_fd 443
#endif
#ifndef PRJQUOTA
#define PRJQUOTA 2
#endif

int set_project(int fd, uint32_t project)
{
    struct fsxattr attr;
    if (ioctl(fd, FS_IOC_FSGETXATTR, &attr) < 0)
        return -errno;
    attr.fsx_projid = project;
    attr.fsx_xflags |= FS_XFLAG_PROJINHERIT;
    return (int)KERNEL(ioctl(fd, FS_IOC_FSSETXATTR, &attr));
}

/* The generic interface, which XFS serves as well as ext4; block counts are in KiB there. */
int set_project_limit(int fd, uint32_t project, uint64_t bytes, uint64_t inodes)
{
    struct if_dqblk block = {
        .dqb_bhardlimit = (bytes + 1023) >> 10,
        .dqb_ihardlimit = inodes,
        .dqb_valid = QIF_LIMITS,
    };
    return (int)KERNEL(
        syscall(SYS_quotactl_fd, fd, QCMD(Q_SETQUOTA, PRJQUOTA), project, &block));
}

int get_project_usage(int fd, uint32_t project, struct project_usage *usage)
{
    struct if_dqblk block = { 0 };
    int error = (int)KERNEL(
        syscall(SYS_quotactl_fd, fd, QCMD(Q_GETQUOTA, PRJQUOTA), project, &block));
    if (error == 0)
        *usage = (struct project_usage){
            .bytes = block.dqb_curspace,
            .limit_bytes = block.dqb_bhardlimit << 10,
            .inodes = block.dqb_curinodes,
            .limit_inodes = block.dqb_ihardlimit,
        };
    return error;
}
