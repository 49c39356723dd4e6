/* One epoll loop; everything that can become ready is a `struct source` inside its owner. */
#ifndef DSEC_LOOP_H
#define DSEC_LOOP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/epoll.h>

struct source {
    int fd; /* -1: closed */
    uint32_t events; /* what epoll watches; 0: not registered */
    void (*ready)(struct source *self, uint32_t events);
};

#define owner_of(pointer, type, member) \
    ((type *)(void *)((char *)(pointer) - offsetof(type, member)))

int loop_open(void);
/* Run one round: wait until something is ready or `timeout_ms` passed. */
void loop_round(int timeout_ms);

/* Take the descriptor over. False: epoll is out of room; the caller still owns the descriptor. */
bool source_open(struct source *source, int fd, uint32_t events,
                 void (*ready)(struct source *, uint32_t));
/* Change what is waited for; 0 stops even hang-up reports until the next change. */
void source_watch(struct source *source, uint32_t events);
void source_close(struct source *source);
/* Stop watching and give the descriptor back. */
int source_release(struct source *source);

uint64_t now_us(void); /* monotonic; stands still from clock_stop to clock_go */
void clock_stop(void);
void clock_go(void);
double now_wall(void); /* seconds since the epoch */

/* Memory that goes back to the system when freed. NULL when there is none. */
void *map_alloc(size_t n);
/* For the life of the process, and not there in a child: what init keeps for itself costs a fork
 * nothing, neither copied page tables nor copies of the pages that init goes on writing. All tables
 * share one mapping, without gaps: the first entries of small ones are in one page. */
bool tables_open(void);
void *table_alloc(size_t n);
void *map_resize(void *old, size_t old_n, size_t new_n);
void map_free(void *p, size_t n);

#endif
