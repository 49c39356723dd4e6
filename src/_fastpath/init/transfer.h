/* Calls that move bytes: file operations in a child of ours, and TCP forwards.
 *
 * A file operation is a forked child that enters the sandbox as the user and works with blocking
 * calls. It speaks on three descriptors: a control socket for its result, a pipe for what it
 * produces (items, limited by the caller's credits) and a pipe for what the caller streams to it.
 */
#ifndef DSEC_TRANSFER_H
#define DSEC_TRANSFER_H

#include "args.h"
#include "conn.h"
#include "files.h"

struct chunk {
    struct chunk *next;
    size_t size, n, at;
    uint8_t data[];
};

struct transfer {
    bool used, forward, connecting, v6, collect, watch, held;
    bool freezes; /* commands stand still until it is over */
    bool ended; /* the caller's stream is complete */
    bool have_result;
    uint16_t port;
    pid_t pid;
    struct call *call;
    struct source ctl, from, to;
    struct chunk *head, *tail;
    uint8_t *result;
    size_t result_cap, result_n;
};

/* False: the call has failed. */
bool transfer_start(struct call *call, enum file_op op, const struct path_args *args);
void forward_start(struct call *call, uint16_t port);
bool transfers_reap(pid_t pid);
/* Kill a child that was stopped and fail its call; true: the pid is a file operation's. */
bool transfers_stopped(pid_t pid);
bool transfer_table_open(void);
/* File operations and watches; a forward touches no file. */
unsigned transfers_on_files(void);

/* Between transfer.c and forward.c. */
struct transfer *transfer_new(struct call *call);
void transfer_free(struct transfer *t);
void transfer_fail(struct transfer *t, const struct failure *failure);
void transfer_from_ready(struct source *source, uint32_t events);
void transfer_to_ready(struct source *source, uint32_t events);
/* A forward's socket became writable; false: still connecting or failed and gone. */
bool forward_connected(struct transfer *t);

#endif
