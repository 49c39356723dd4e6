/* Files of several names in a saved upper: one file each in the root that stands on it, too. */
#ifndef DSEC_SPAWNER_LINKS_H
#define DSEC_SPAWNER_LINKS_H

#include "spawner/create.h"

/* Overlayfs copies up one name of a file and leaves the others as they were. So before anybody sees the
 * new root, each such file of the newest saved upper is copied up through the overlay, and its names
 * are linked there. Older saved uppers need no look: the upper that was laid on them has it all.
 * Does nothing unless the plan says that there may be such files; `c->linked` tells whether there are. */
int keep_links(struct creation *c);

#endif
