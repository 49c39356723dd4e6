/* One fetch: read a run of chunks from the source, check each, write the good ones, answer the jobs. */
#ifndef DSEC_BLOBD_BRING_H
#define DSEC_BLOBD_BRING_H

#include "blobd/jobs.h"

struct fetcher; /* what a fetch thread owns */

struct fetcher *fetcher_open(void);
/* Bring what `fetch` owns, or fail; it owns nothing afterwards. */
void fetch_run(struct fetcher *fetcher, struct fetch *fetch);

#endif
