/* Children that never copy the parent's memory: clone3 on a stack of their own. */
#ifndef DSEC_NATIVE_PROCESS_H
#define DSEC_NATIVE_PROCESS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define CHILD_STACK (64u << 10) /* bytes */

struct spawn {
    uint64_t flags;   /* CLONE_*, besides CLONE_VM, which is always set */
    int exit_signal;  /* 0: the child is waited for with __WCLONE and disturbs no handler */
    int cgroup;       /* with CLONE_INTO_CGROUP */
    int *pidfd;       /* with CLONE_PIDFD */
    void *stack;      /* CHILD_STACK bytes */
    int (*run)(void *argument); /* its result is the exit status */
    void *argument;
};

/* Start the child; with CLONE_VFORK returns once it has executed or ended. Returns its pid. The
 * child shares our memory: `run` may use only its own stack, `argument` and plain system calls. */
pid_t spawn_child(const struct spawn *spawn);

/* A stack for `spawn_child`, or NULL; free with `free_stack`. */
void *make_stack(void);
void free_stack(void *stack);

/* Run `run` in a vfork-style child with `flags` and wait for its end. Returns its status 0..255,
 * or a negative errno. */
int run_in_child(uint64_t flags, int (*run)(void *), void *argument);

#endif
