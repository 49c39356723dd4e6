cdef extern from "native/namespaces.h" nogil:
    int c_make_userns "make_userns"(
        uint32_t base, uint32_t count, uint32_t owner, const char **step)
    int c_make_shift_userns "make_shift_userns"(
        uint32_t origin, uint32_t target, uint32_t count, const char **step)
    int c_make_netns "make_netns"(const char **step)
    int c_netns_reusable "netns_reusable"(int netns)


def make_userns(uint32_t uid_base, uint32_t owner_uid):
    cdef const char *step = ""
    cdef int fd
    with nogil:
        fd = c_make_userns(uid_base, 65535, owner_uid, &step)
    return checked(fd, step)


def make_shift_userns(uint32_t from_base, uint32_t to_base):
    cdef const char *step = ""
    cdef int fd
    with nogil:
        fd = c_make_shift_userns(from_base, to_base, 65535, &step)
    return checked(fd, step)


def make_netns():
    cdef const char *step = ""
    cdef int fd
    with nogil:
        fd = c_make_netns(&step)
    return checked(fd, step)


def netns_reusable(int fd):
    cdef int result
    with nogil:
        result = c_netns_reusable(fd)
    return checked(result, "setns") == 1
