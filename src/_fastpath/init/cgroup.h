/* One cgroup v2 directory per running command below the sandbox's own (fd 6): kill reaches what
 * left the process tree. Directories are reused; one whose processes live on waits until they end. */
#ifndef DSEC_CGROUP_H
#define DSEC_CGROUP_H

#include <stdbool.h>
#include <sys/types.h>

#define NO_CGROUP (-1)   /* the host has no v2 tree: trees are killed by walking /proc */
#define CGROUP_FULL (-2) /* MAX_CGROUPS trees live, or the directory cannot be made */

bool cgroup_table_open(void);
int cgroup_acquire(void);
int cgroup_fd(int slot);
void cgroup_kill(int slot);
/* SIGKILL every process of it but `spared`; how many were hit. */
int cgroup_kill_others(int slot, pid_t spared);
int cgroup_signal_others(int slot, pid_t spared, int signal);
/* The command is forgotten: reuse the directory now or when its last process has ended. */
void cgroup_release(int slot);
/* The same, but only if it is empty now: true. */
bool cgroup_release_empty(int slot);
void cgroups_sweep(void);

#endif
