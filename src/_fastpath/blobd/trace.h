/* Traces: in which order the chunks of a set of blobs were first read. */
#ifndef DSEC_BLOBD_TRACE_H
#define DSEC_BLOBD_TRACE_H

#include "blobd/blob.h"

#define TRACES_MAX 64u
#define TRACE_BLOBS_MAX 256u
#define TRACE_STEPS_MAX (1u << 20)

struct step {
    uint32_t blob; /* position in the trace's set */
    uint32_t first, count;
};

/* Begin trace `number` over `blobs`, whose references it takes. -EEXIST, -EAGAIN (too many). */
int trace_start(uint64_t number, struct blob **blobs, uint32_t count);
/* Copy up to `room` steps from `from` on; `total` gets how many there are. -ENOENT. */
int trace_read(uint64_t number, uint32_t from, struct step *steps, uint32_t room, uint32_t *copied,
               uint32_t *total);
int trace_stop(uint64_t number); /* and forget it; -ENOENT */
void trace_note(struct blob *blob, uint32_t first, uint32_t last);

#endif
