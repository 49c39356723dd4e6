/* The root of the sandbox, replaced as a whole while nobody is in it. */
#ifndef DSEC_ROOT_H
#define DSEC_ROOT_H

#include <sys/types.h>

#include "conn.h"

/* Whoever enters the sandbox from now on enters the mount namespace that came with the call, and the upper
 * that came with it is the upper. Both or none is replaced. */
void root_swap(struct call *call, struct mp_bytes args);
/* Go on with a swap that waits; the instant it is given up, or 0. */
uint64_t root_tick(uint64_t now);
/* The child that took an old root down ended; false: it is another one. */
bool root_reap(pid_t pid);

#endif
