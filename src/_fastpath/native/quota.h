/* Project quotas of an XFS or ext4 volume: a hard limit for one directory tree. */
#ifndef DSEC_NATIVE_QUOTA_H
#define DSEC_NATIVE_QUOTA_H

#include <stdint.h>

struct project_usage {
    uint64_t bytes, limit_bytes, inodes, limit_inodes;
};

/* Put the empty directory `fd` into `project`; what is made below it inherits. */
int set_project(int fd, uint32_t project);
/* Hard limits of `project` on the volume of `fd`; 0 lifts a limit. */
int set_project_limit(int fd, uint32_t project, uint64_t bytes, uint64_t inodes);
int get_project_usage(int fd, uint32_t project, struct project_usage *usage);

#endif
