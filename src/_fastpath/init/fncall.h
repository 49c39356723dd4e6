/* Calls of functions (docs/fncall.md): a child of dsec-init, the keeper, makes one room after the other and
 * runs one call in each. What a call can change ends with its room.
 *
 *   keeper   root of the sandbox, in a mount namespace of its own where nothing can be written
 *   zygote   a Python that has imported what the pool declares, the keeper's child; it forks into each room
 *   room     PID, mount and IPC namespaces around a PID 1 that does nothing, and empty places to write to
 *   call     the zygote's fork in the room: no capability, no descriptor but its own; the keeper's child,
 *            too, so the keeper learns its status
 *
 * The kernel lets PID 1 of a room be reaped only when no process of it is left.
 */
#ifndef DSEC_FNCALL_H
#define DSEC_FNCALL_H

#include <sys/types.h>

#include "child.h"
#include "conn.h"

/* Start the keeper; the descriptor that comes with the call becomes its channel. */
void fncall_serve(struct call *call, struct mp_bytes args);

/* --- for the keeper's own files -------------------------------------------------------------- */

#define OUTPUTS 3 /* value, stdout, stderr */
#define MAX_OUTPUT (1u << 20)

struct room {
    pid_t init, call; /* 0: reaped */
    int status;       /* of the call, as wait(2) has it */
    int work;         /* the directory that the call begins in */
    int line;         /* stream to the call: the request, and the value back */
    int out, err;
};

struct keeper {
    int zygote; /* its control socket */
    int log;    /* what it wrote to stdout and stderr */
    pid_t zygote_pid;
    int signals; /* SIGCHLD */
    uint64_t files_bytes;
    bool network;
    unsigned sockets; /* in the network namespace before the first call */
};

/* fncall_room.c. Failures are reported on the channel and end the keeper, and with it the worker. */
void keeper_open(struct keeper *keeper, const struct fncall_args *args, const struct identity *who);
void room_open(const struct keeper *keeper, struct room *room);
/* Take note of children that ended. */
void room_reap(const struct keeper *keeper, struct room *room);
/* Kill whatever is in the room, and return when nothing of it is left. */
void room_empty(const struct keeper *keeper, struct room *room);
void room_close(struct room *room);
/* Sockets that outlive their processes (TIME_WAIT and the like) make a network namespace dirty. */
bool network_clean(const struct keeper *keeper);

/* fncall_call.c. What the daemon sends, and what it is sent; both ends are of one build. */
struct ask {
    uint32_t kind; /* ASK_... */
    uint32_t wall_ms, output_limit, answer_limit;
    uint32_t paths; /* bytes: of files to bring back, each ended by NUL */
    uint32_t body;  /* bytes: for the call itself, not looked at */
};

enum { ASK_CALL = 1, ASK_KILL };
enum { ANSWER_READY = 16, ANSWER_DONE };

_Noreturn void fncall_loop(const struct keeper *keeper);

#endif
