/* One container: built step by step, undone in reverse when a step fails.
 *
 * The order is what makes it secure (docs/decisions/0001-spawner.md): every mount is made by real
 * root in a first mount namespace; only then a second one is unshared inside the sandbox's user
 * namespace, which locks all of them against root inside.
 */
#ifndef DSEC_SPAWNER_CREATE_H
#define DSEC_SPAWNER_CREATE_H

#include <sys/types.h>

#include "native/steps.h"
#include "spawner/host.h"
#include "spawner/plan.h"

/* Descriptors of a creation; -1 when not (yet) there. */
enum {
    FD_USERNS,   /* given */
    FD_NETNS,    /* given */
    FD_CGROUP,   /* v2 directory of the sandbox, absent when the plan names none */
    FD_RUNTIME,  /* directory */
    FD_LISTENER, /* agent.sock */
    FD_SPOOL,    /* directory, of all sandboxes */
    FD_UPPER,    /* detached mount that holds u/, w/ and s/; PID 1 keeps it */
    FD_ANCHOR,   /* the same, attached while the overlay is made; absent unless host.by_path */
    FD_SHM,      /* detached clone of s/ */
    FD_LAYER_U,  /* directory u/: the upper */
    FD_LAYER_W,  /* directory w/: the work directory */
    FD_OVERLAY,
    FD_DEV,      /* detached clone of the plan's own /dev, absent: ours */
    FD_PTS,
    FD_PROC,     /* of a re-rooting: detached clone of the sandbox's own tree at /proc */
    FD_CONFIG,
    FD_NS_MNT,   /* made by the child */
    FD_NS_IPC,
    FD_NS_UTS,
    FD_COUNT
};

struct creation {
    struct host *host;
    const struct container_plan *plan;
    struct steps steps;
    int fd[FD_COUNT];
    int lowers[LOWERS_MAX];
    int binds[LIST_MAX];
    bool made_cgroup, made_runtime, made_upper_dir, made_upper;
    bool linked; /* files of several names came from the newest saved upper */
    int child_error; /* written by the child: it shares our memory */
    const char *where; /* so is this: the path of the plan that a step failed at, NULL: none */
    pid_t pid;
    int pidfd;
};

/* Build the container of `plan`. `fds`: user and network namespace, then the lowers, bottom
 * first; they stay the caller's. On success `pid` and `pidfd` are set and only `pidfd` is left open; on
 * failure nothing is left and the step is in `steps.current`. */
int create_container(struct creation *creation, struct host *host,
                     const struct container_plan *plan, const int *fds);

/* What the new process does up to the exec of PID 1 (child.c); returns only on failure. */
int run_container_child(void *creation);

#endif
