/* Blobs read by EROFS from their cache files, filled before the read goes on; see preaccess.c. */
#ifndef DSEC_BLOBD_PREACCESS_H
#define DSEC_BLOBD_PREACCESS_H

#include "blobd/blob.h"

#define PREACCESS_UNIQUE (1ULL << 62) /* of a read that is such an event; FUSE uses no number like it */

/* Use the group and the slots of these descriptors, of a dead process too. Call it before anything
 * else is opened. 0 or negative errno. */
int preaccess_open(int group, int slots);
bool preaccess_enabled(void);
/* Answer what a dead process had taken, then what comes. */
bool preaccess_start(void);

/* Have reads of the data file wait for us; the lock of the blob is held. Only files that are opened
 * afterwards are concerned. 0 or negative errno. */
int preaccess_watch(struct blob *blob);
void preaccess_unwatch(struct blob *blob);

void preaccess_answer(uint64_t unique, bool allow);

#endif
