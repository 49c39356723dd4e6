/* Files of the sandbox that a policy closes to it: mounts over paths of its root. */
#ifndef DSEC_SPAWNER_GUARDS_H
#define DSEC_SPAWNER_GUARDS_H

#include "spawner/create.h"

/* Put every guard of the plan into place; called last in a new root, in the child. Leaves the spawner's
 * small root, where masks come from, for the sandbox's. On failure `c->where` is the guard's path. */
int attach_guards(struct creation *c);

#endif
