/* Loads the programs for files, of bpf/lsm/, from their light skeleton. */
#ifndef DSEC_BPF_LSM_H
#define DSEC_BPF_LSM_H

#include <stdint.h>

enum { LSMPOLICY_MAPS = 6, LSMPOLICY_PROGRAMS = 26 };

/* Descriptors: maps in the order of _core.pyi, programs in that of the skeleton. */
struct lsmpolicy_fds {
    int maps[LSMPOLICY_MAPS];
    int programs[LSMPOLICY_PROGRAMS];
};

/* Returns 0, or a negative errno and the step; on failure nothing stays loaded. */
int lsmpolicy_load_fds(uint32_t sandbox_level, struct lsmpolicy_fds *fds, const char **step);

/* From a digest of the sources in bpf/lsm/: equal programs and maps have equal numbers. */
uint64_t lsmpolicy_version(void);

#endif
