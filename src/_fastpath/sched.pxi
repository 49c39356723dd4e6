cdef extern from "native/sched.h" nogil:
    cdef enum cookie_scope:
        COOKIE_THREAD
        COOKIE_PROCESS
        COOKIE_PROCESS_GROUP
    int c_create_cookie "create_cookie"(pid_t pid, cookie_scope scope)
    int c_share_cookie "share_cookie"(pid_t source, pid_t target, cookie_scope scope)
    int c_get_cookie "get_cookie"(pid_t pid, uint64_t *cookie)


def make_sched_cookie(pid_t pid):
    checked(c_create_cookie(pid, COOKIE_PROCESS), "sched_core_create")


def share_sched_cookie(pid_t source, pid_t target):
    checked(c_share_cookie(source, target, COOKIE_PROCESS), "sched_core_share")


def get_sched_cookie(pid_t pid):
    cdef uint64_t cookie = 0
    checked(c_get_cookie(pid, &cookie), "sched_core_get")
    return cookie
