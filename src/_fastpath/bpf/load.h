/* Loads the network programs of bpf/ from their light skeleton. */
#ifndef DSEC_BPF_LOAD_H
#define DSEC_BPF_LOAD_H

#include <stdint.h>

enum { NETPOLICY_MAPS = 8, NETPOLICY_PROGRAMS = 8 };

struct netpolicy_options {
    uint32_t sandbox_level, deny_unbound, events_per_s;
};

/* Descriptors, in the order of _core.pyi. */
struct netpolicy_fds {
    int maps[NETPOLICY_MAPS];
    int programs[NETPOLICY_PROGRAMS];
};

/* Returns 0, or a negative errno and the step; on failure nothing stays loaded. */
int netpolicy_load_fds(const struct netpolicy_options *options, struct netpolicy_fds *fds,
                       const char **step);

/* From a digest of the sources in bpf/: equal programs and maps have equal numbers. */
uint64_t netpolicy_version(void);

#endif
