#include "native/filter.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>

#include "native/kernel.h"

int install_filter(int fd)
{
    static struct sock_filter filter[BPF_MAXINSNS + 1];

    ssize_t size = pread(fd, filter, sizeof filter, 0);
    if (size < 0)
        return -errno;
    if (size == 0 || size == sizeof filter || size % sizeof *filter)
        return -EINVAL;
    struct sock_fprog program = { (unsigned short)(size / sizeof *filter), filter };
    /* Without no_new_privs, which CAP_SYS_ADMIN allows: set-user-ID programs work in a sandbox. */
    return (int)KERNEL(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program));
}
