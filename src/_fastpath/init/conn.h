/* Connections and the calls open on them (docs/protocol.md).
 *
 * A call is closed by exactly one reply or failure; both free it. What makes a call advance is its
 * `pump`: it is called when the connection has room again, when a credit came, and by whoever
 * produced something for it. A pump that finds nothing to do returns.
 */
#ifndef DSEC_CONN_H
#define DSEC_CONN_H

#include "../wire/msgpack.h"
#include "limits.h"
#include "loop.h"

struct call;
struct job;
struct transfer;

struct call_ops {
    void (*pump)(struct call *);
    void (*item)(struct call *, struct mp_bytes raw); /* NULL: items are ignored */
    void (*end)(struct call *);
    void (*cancel)(struct call *);
    void (*drop)(struct call *); /* the connection is gone; the call is freed afterwards */
};

struct conn {
    struct source io;
    uint8_t *rx;
    size_t rx_cap, rx_len;
    uint8_t *tx;
    size_t tx_cap, tx_start, tx_len;
    struct call *calls;
    unsigned open_calls;
    int fds[RX_FDS]; /* that came with what is in rx */
    unsigned n_fds;
    bool used, doomed, processing;
    bool port;  /* of a VM: it stays when the peer has gone */
    bool ended; /* the peer has gone, and all it sent was read */
    uint64_t held_until; /* != 0: later requests wait until a watch is in effect */
};

struct call {
    uint64_t id;
    struct conn *conn; /* NULL: slot is free */
    struct call *next; /* in conn->calls */
    const struct call_ops *ops;
    uint32_t credit; /* items we may send */
    uint32_t owed;   /* items the caller may still send */
    struct job *job;
    struct call *job_next; /* in job->calls */
    struct transfer *transfer;
    uint64_t offset[2]; /* of a follower: next byte to send of stdout, stderr */
    uint64_t limit[2];
    bool streaming, limited, cancelled;
    uint8_t *data; /* of exec.stdin: what is not written yet */
    size_t data_cap, data_start, data_len;
    bool eof;
};

struct failure {
    const char *code; /* of libdsec/errors.py */
    const char *reason; /* NULL, or detail {"reason": ...} */
    char message[224];
};

bool conns_open(int listen_fd);
bool conn_table_open(void);
bool call_table_open(void);
/* Serve who is at the other end, with clean state; false: no memory. */
bool conn_begin(struct conn *conn);
void conn_send(struct conn *conn, const void *frame, size_t n);
bool conn_room(const struct conn *conn);
/* The peer broke the protocol: close once the running handler has returned. */
void conn_doom(struct conn *conn);
void conn_hold(struct conn *conn);
/* Take the `n` descriptors that came with the frame being handled; false: it is another number. */
bool conn_take_fds(struct conn *conn, int *fds, unsigned n);
/* Close doomed connections, end overdue holds; returns the next instant something is due or 0. */
uint64_t conns_tick(uint64_t now);

struct call *call_open(struct conn *conn, uint64_t id);
struct call *call_find(struct conn *conn, uint64_t id);
void calls_drop(struct conn *conn);
void calls_drop_others(struct call *kept); /* of its connection */

/* Shared memory for frames and chunks in the making; valid until the next frame is begun. */
extern uint8_t *scratch;
#define SCRATCH_BYTES (MAX_FRAME + (64u << 10))
bool scratch_open(void);
void scratch_used(size_t n);
void scratch_trim(void);

/* A frame on `scratch`: begin, fill, send. */
struct mp_writer frame_begin(void);
bool frame_send(struct conn *conn, struct mp_writer *w);

struct mp_writer reply_begin(struct call *call);
void reply_send(struct call *call, struct mp_writer *w);
void reply_nil(struct call *call);
void reply_raw(struct call *call, const void *raw, size_t n);
void call_fail(struct call *call, const char *code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
void call_fail_with(struct call *call, const struct failure *failure);
/* Make the caller's next `n` items welcome. */
void call_grant(struct call *call, uint32_t n);

/* An item whose bytes are read in place: `item_room` gives where, `item_send` sends `n` of them. */
uint8_t *item_room(struct call *call);
void item_send(struct call *call, size_t n);
void item_send_raw(struct call *call, const void *raw, size_t n);

/* Handle one frame's body; false: the peer broke the protocol. */
bool dispatch(struct conn *conn, struct mp_bytes body);

void text_clean(char *text); /* control characters and broken UTF-8 become '?' */

#endif
