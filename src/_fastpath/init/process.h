/* What init knows about itself as a process, and the reaping of everything that ends below it. */
#ifndef DSEC_PROCESS_H
#define DSEC_PROCESS_H

#include <stdbool.h>
#include <sys/types.h>

extern bool namespace_given[5]; /* descriptors 7..11 that the spawner passed */
extern int null_fd;

/* Close what must not leak, become unreadable, take SIGCHLD over; NULL or what failed. */
const char *process_open(void);
/* Commands are to be preferred by the OOM killer. A child cannot write its own score (it is not
 * dumpable, so its /proc files belong to the host's root): it inherits init's, raised for a moment. */
void oom_score_raise(bool raised);
/* SIGKILL every process below `root` or in its session: hosts without the v2 tree only. */
void tree_kill(pid_t root);
/* No other process lives in the sandbox: whoever loses its parent becomes our child. */
bool process_alone(void);
/* No free block or inode is left in the sandbox's root. */
bool disk_is_full(void);

#endif
