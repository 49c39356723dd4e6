/* The agent of a virtual machine (docs/protocol.md, "In a VM"): its PID 1, or a service of a system that has
 * a root and a PID 1 of its own. */
#ifndef DSEC_VM_H
#define DSEC_VM_H

#include "../native/steps.h"
#include "conn.h"
#include "vm_args.h"

enum vm_state {
    VM_NONE,    /* a container */
    VM_WAITING, /* for vm.begin */
    VM_BEGUN,
};

extern enum vm_state vm_state;
extern bool vm_service; /* not PID 1 */

/* What the kernel left to do: file systems, limits, and descriptors in their places: the port, the shell.
 * NULL, or what failed. */
const char *vm_open(bool service);
/* False when `op` is none that can be asked for now: the call has failed. */
bool vm_admits(struct call *call, struct mp_bytes op);

void vm_begin(struct call *call, struct mp_bytes raw);
void vm_renew(struct call *call, struct mp_bytes raw);
void vm_clock(struct call *call, struct mp_bytes raw);
void vm_watch(struct call *call, struct mp_bytes raw);
void vm_pack(struct call *call, struct mp_bytes raw);
/* The call that froze the commands is over. */
void vm_thaw(void);
/* Tell whoever watches of out-of-memory kills: before the result of a command that was one of them. */
void vm_watch_check(void);

/* --- what vm.begin and vm.renew do; each returns 0 or -errno ----------------------------------------- */

struct vm_build {
    struct steps steps;
    char where[MAX_PATH]; /* a device or file that the step failed at; "": none */
};

int vm_build(struct vm_build *build, const struct vm_args *args);
/* Make a machine that was copied one of its own. */
int vm_build_again(struct vm_build *build, const struct vm_args *args);
int vm_root_assemble(struct vm_build *build, const struct vm_args *args);
int vm_spool_open(void);
int vm_cgroup_make(uint64_t pids);
int vm_files_write(struct vm_build *build, const struct vm_args *args);
int vm_loopback_up(void);
/* In the place of what it did before. */
int vm_network_up(const struct vm_network *network);
int vm_reclaim_start(uint32_t min_age_s, uint64_t swap_bytes);

/* vm_clock.c */
int vm_random_open(void);
int vm_time_set(uint64_t time_ns);
int vm_entropy_add(struct mp_bytes entropy);

/* vm_watch.c: count of the kernel, and what tells that it changed. */
int vm_kills_open(void);
int vm_kills_follow(void);

/* Write to a file of the kernel. */
int vm_write_text(const char *path, const char *text);
/* Mount `type` at `path`, which is made if need be. */
int vm_mount(const char *type, const char *path, unsigned long flags, const char *options);
/* Move `fd` to the place `number`, which is in use. Takes `fd`, which may be an error. */
int vm_place(int fd, int number);

#endif
