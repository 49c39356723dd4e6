cdef extern from "bpf/load.h" nogil:
    cdef struct c_options "netpolicy_options":
        uint32_t sandbox_level, deny_unbound, events_per_s
    cdef struct c_fds "netpolicy_fds":
        int maps[8]
        int programs[8]
    int c_load_fds "netpolicy_load_fds"(const c_options *options, c_fds *fds, const char **step)
    uint64_t c_version "netpolicy_version"()


def load_network_programs(
    uint32_t sandbox_level, bint deny_unbound, uint32_t events_per_s
):
    cdef c_options options
    cdef c_fds fds
    cdef const char *step = ""
    cdef int result
    options.sandbox_level = sandbox_level
    options.deny_unbound = deny_unbound
    options.events_per_s = events_per_s
    with nogil:
        result = c_load_fds(&options, &fds, &step)
    checked(result, step)
    return [fds.maps[i] for i in range(8)], [fds.programs[i] for i in range(8)]


def network_programs_version():
    return c_version()


cdef extern from "bpf/lsm.h" nogil:
    cdef struct c_lsm_fds "lsmpolicy_fds":
        int maps[6]
        int programs[26]
    int c_load_lsm_fds "lsmpolicy_load_fds"(
        uint32_t sandbox_level, c_lsm_fds *fds, const char **step)
    uint64_t c_lsm_version "lsmpolicy_version"()


def load_file_programs(uint32_t sandbox_level):
    cdef c_lsm_fds fds
    cdef const char *step = ""
    cdef int result
    with nogil:
        result = c_load_lsm_fds(sandbox_level, &fds, &step)
    checked(result, step)
    return [fds.maps[i] for i in range(6)], [fds.programs[i] for i in range(26)]


def file_programs_version():
    return c_lsm_version()


# These calls do not wait, so they keep the GIL: given away, it would have to be waited for.
cdef extern from "bpf/map.h":
    int c_update "map_update"(int map, const char *key, const char *value, uint64_t flags)
    int c_update_batch "map_update_batch"(
        int map, const char *keys, const char *values, uint32_t count)
    int c_delete_batch "map_delete_batch"(int map, const char *keys, uint32_t count)


def update_map(int fd, bytes key not None, bytes value not None, uint64_t flags):
    checked(c_update(fd, key, value, flags), "update")


def update_map_batch(int fd, bytes keys not None, bytes values not None, uint32_t count):
    checked(c_update_batch(fd, keys, values, count), "update")


def delete_map_batch(int fd, bytes keys not None, uint32_t count):
    checked(c_delete_batch(fd, keys, count), "delete")
