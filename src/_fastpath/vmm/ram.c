/* Loaded into QEMU (LD_PRELOAD) when its guest's memory is a file that it may only read: mapped copy-on-write.
 *
 * QEMU opens the file for writing (before 8.2 there is no other way), which a private mapping does not need. It is told that
 * the memory is shared, for then it keeps it out of saved states. And to discard memory (balloon, free page reporting)
 * it first punches a hole into the file, and then drops what it has mapped. Only the second is done here: the page
 * is as the file has it again, on which the guest does not rely. */
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define RAM "/vm/ram" /* RAM_INSIDE of backends/microvm_plan.py */

int __open64_2(const char *path, int flags); /* open64 of two arguments, with _FORTIFY_SOURCE */

static int ram_fd = -1;

static int open_file(const char *path, int flags, mode_t mode)
{
    if (strcmp(path, RAM) != 0)
        return (int)syscall(SYS_openat, AT_FDCWD, path, flags | O_LARGEFILE, mode);
    ram_fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
    return ram_fd;
}

int open64(const char *path, int flags, ...)
{
    mode_t mode = 0;
    if (flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE) {
        va_list more;
        va_start(more, flags);
        mode = va_arg(more, mode_t);
        va_end(more);
    }
    return open_file(path, flags, mode);
}

int __open64_2(const char *path, int flags)
{
    return open_file(path, flags, 0);
}

void *mmap64(void *address, size_t size, int protection, int flags, int fd, off64_t offset)
{
    if (fd >= 0 && fd == ram_fd)
        flags = (flags & ~MAP_TYPE) | MAP_PRIVATE;
    return (void *)syscall(SYS_mmap, address, size, protection, flags, fd, offset);
}

int fallocate64(int fd, int mode, off64_t offset, off64_t size)
{
    if (fd >= 0 && fd == ram_fd && mode & FALLOC_FL_PUNCH_HOLE)
        return 0;
    return (int)syscall(SYS_fallocate, fd, mode, offset, size);
}
