/* Every bound of dsec-init in one place: nothing in it grows without one of these. */
#ifndef DSEC_LIMITS_H
#define DSEC_LIMITS_H

#define MAX_JOBS 256          /* commands known: running, queued or remembered */
#define MAX_FINISHED 128      /* remembered after their end */
#define MAX_FOREGROUND 16     /* of these, foreground commands whose answer was sent */
#define MAX_TRANSFERS 256     /* file operations, watches and forwards at a time */
#define MAX_SESSIONS 64
#define MAX_DRAINS 2048       /* pipes still held by processes of forgotten commands */
#define MAX_CGROUPS 1024      /* directories: running commands + trees left in the background */
#define MAX_CONNS 8
#define MAX_CALLS_PER_CONN 1024
#define MAX_CALLS 2048
#define MAX_FRAME (4u << 20)  /* as libdsec/wire.py */
#define MAX_ITEM (256u << 10)
#define INLINE_BYTES (64u << 10)
#define INITIAL_CREDIT 16
#define RX_FDS 2              /* descriptors that may come with a frame, and wait for it */
#define TX_HIGH (1u << 20)    /* queued bytes above which a connection gets no more items */
#define RX_SMALL (16u << 10)
#define STREAM_MEMORY (16u << 10) /* output kept in memory before it goes to a spool file */
#define READ_CHUNK (64u << 10)
#define STDIN_QUEUED (16u << 20)  /* bytes waiting in all exec.stdin calls together */
#define MAX_NAME 128          /* cid, session and user names */
#define MAX_COMMAND (1u << 20) /* bytes of a session command */
#define MAX_PATH 4096
#define SESSION_GRACE_US 200000
#define HOLD_US 1000000
#define VACATE_US 500000 /* how long the swap of the root waits for processes that are about to end */
#define LEAVE_US 3000000 /* a file operation's child may outlive its call by this */

#endif
