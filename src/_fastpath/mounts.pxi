from libc.stdlib cimport free, malloc

cdef extern from "native/kernel.h" nogil:
    int k_open_tree(int at, const char *path, unsigned flags)
    int k_move_mount(int tree, int at, const char *path)
    int k_mount_setattr(int at, const char *path, unsigned flags, uint64_t set, int userns)
    unsigned OPEN_TREE_CLONE, AT_RECURSIVE, AT_EMPTY_PATH
    uint64_t MOUNT_ATTR_IDMAP, MOUNT_ATTR_RDONLY
    int AT_FDCWD

cdef extern from "<errno.h>" nogil:
    int errno

cdef extern from "<sys/mount.h>" nogil:
    int c_umount2 "umount2"(const char *target, int flags)
    int MNT_DETACH
    int UMOUNT_NOFOLLOW

cdef extern from "native/mounts.h" nogil:
    int c_mount_erofs "mount_erofs"(
        const char *image, const char *const *devices, int count, bint direct,
        const char **step)


def mount_erofs(image, devices=(), bint direct=False):
    cdef list encoded = [os.fsencode(device) for device in devices]
    cdef bytes path = os.fsencode(image)
    cdef const char *source = path
    cdef const char *step = ""
    cdef int fd, count = <int>len(encoded)
    cdef const char **names = <const char **>malloc((count + 1) * sizeof(char *))
    if names == NULL:
        raise MemoryError
    try:
        for index in range(count):
            names[index] = encoded[index]
        with nogil:
            fd = c_mount_erofs(source, names, count, direct, &step)
    finally:
        free(names)
    return checked(fd, step)


def open_tree(path, bint clone, bint recursive=False):
    cdef bytes encoded = os.fsencode(path)
    cdef const char *source = encoded
    cdef unsigned flags = 0
    cdef int fd
    if clone:
        flags = OPEN_TREE_CLONE | (AT_RECURSIVE if recursive else 0)
    with nogil:
        fd = k_open_tree(AT_FDCWD, source, flags)
    return checked(fd, "open_tree")


def move_mount(int fd, target):
    cdef bytes encoded = os.fsencode(target)
    cdef const char *path = encoded
    cdef int result
    with nogil:
        result = k_move_mount(fd, AT_FDCWD, path)
    checked(result, "move_mount")


def idmap_mount(int fd, int userns):
    cdef int result
    with nogil:
        result = k_mount_setattr(fd, "", AT_EMPTY_PATH, MOUNT_ATTR_IDMAP, userns)
    checked(result, "mount_setattr")


def umount(target, bint detach=True):
    cdef bytes encoded = os.fsencode(target)
    cdef const char *path = encoded
    cdef int result, flags = UMOUNT_NOFOLLOW | (MNT_DETACH if detach else 0)
    with nogil:
        result = c_umount2(path, flags)
        if result < 0:
            result = -errno
    checked(result, "umount")
