/* One turn of the agent: events, then everything that is due. */
#ifndef DSEC_SERVE_H
#define DSEC_SERVE_H

/* The loop and, after `tables_open`, every table; NULL or what failed. */
const char *serve_open(void);
/* Wait at most `limit_ms` (-1: as long as nothing is due). */
void serve_round(int limit_ms);

#endif
