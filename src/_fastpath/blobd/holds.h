/* Layers that are mounted on the cache files themselves; see holds.c. */
#ifndef DSEC_BLOBD_HOLDS_H
#define DSEC_BLOBD_HOLDS_H

#include "blobd/blob.h"
#include "blobd/control.h"

#define HOLD_BLOBS_MAX 256u /* of one layer; EROFS images use at most 200 */

/* A blob is registered: hold it for the layers that do. */
void holds_apply(struct blob *blob);

/* Operations. A second hold of a layer takes the place of the first. */
void do_hold(struct call *call, struct mp_bytes frame);
void do_release(struct call *call, struct mp_bytes frame);
void do_holds(struct call *call, struct mp_bytes frame);

#endif
