/* Another root for a live container, whose commands enter it from then on: the mechanism of checkpoint,
 * rollback and branch. Nothing of the container is touched; what is made is a mount namespace, and
 * the container's PID 1 takes it for its old one (`root.swap`, docs/protocol.md).
 */
#ifndef DSEC_SPAWNER_REROOT_H
#define DSEC_SPAWNER_REROOT_H

#include "spawner/create.h"

/* Build the root of `plan`. `fds`: pidfd of PID 1 and user namespace, then the lowers, bottom first; they
 * stay the caller's. On success `fd[FD_NS_MNT]` and `fd[FD_UPPER]` are left open; on failure nothing is
 * left and the step is in `steps.current`. */
int reroot_container(struct creation *creation, struct host *host,
                     const struct container_plan *plan, const int *fds);

#endif
