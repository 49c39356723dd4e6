cdef extern from "native/tree.h" nogil:
    int c_remove_tree "remove_tree"(int at, const char *name)
    int c_remove_cgroup "remove_cgroup"(int at, const char *name)

cdef extern from "native/quota.h" nogil:
    cdef struct project_usage:
        uint64_t bytes, limit_bytes, inodes, limit_inodes
    int c_set_project "set_project"(int fd, uint32_t project)
    int c_set_project_limit "set_project_limit"(
        int fd, uint32_t project, uint64_t bytes, uint64_t inodes)
    int c_get_project_usage "get_project_usage"(
        int fd, uint32_t project, project_usage *usage)


def remove_tree(path):
    cdef bytes encoded = os.fsencode(path)
    cdef const char *name = encoded
    cdef int result
    with nogil:
        result = c_remove_tree(AT_FDCWD, name)
    checked(result, "remove_tree")


def remove_cgroup(path):
    cdef bytes encoded = os.fsencode(path)
    cdef const char *name = encoded
    cdef int result
    with nogil:
        result = c_remove_cgroup(AT_FDCWD, name)
    checked(result, "remove_cgroup")


def set_project(int fd, uint32_t project):
    checked(c_set_project(fd, project), "fssetxattr")


def set_project_quota(int fd, uint32_t project, uint64_t limit_bytes, uint64_t limit_inodes=0):
    cdef int result
    with nogil:
        result = c_set_project_limit(fd, project, limit_bytes, limit_inodes)
    checked(result, "quotactl_set")


def get_project_usage(int fd, uint32_t project):
    cdef project_usage usage
    cdef int result
    with nogil:
        result = c_get_project_usage(fd, project, &usage)
    checked(result, "quotactl_get")
    return usage.bytes, usage.limit_bytes, usage.inodes, usage.limit_inodes
