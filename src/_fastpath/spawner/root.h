/* The root of a sandbox: built as detached mounts, then attached in a new mount namespace. What a
 * creation and a re-rooting do in the same way. */
#ifndef DSEC_SPAWNER_ROOT_H
#define DSEC_SPAWNER_ROOT_H

#include "spawner/create.h"

/* --- as real root, by the spawner ----------------------------------------------------------------- */

/* Start with nothing built: every descriptor absent. */
void start_creation(struct creation *c, struct host *host, const struct container_plan *plan);

/* Make the directory `path` of the host and open it. `made` tells the undo. */
int make_directory(struct creation *c, const char *path, mode_t mode, bool may_exist, bool *made);

int make_upper(struct creation *c);
/* The upper and the work directory. */
int fill_upper(struct creation *c);
/* What /dev/shm is: in the upper's file system, so that its size is limited with it. */
int make_shm(struct creation *c);
int make_files(struct creation *c);
/* `given`: a mount for each lower, bottom first. */
int map_lowers(struct creation *c, const int *given);
int make_overlay(struct creation *c);
int clone_binds(struct creation *c);

/* Close what these made; before it, remove what they made on the host's disk. */
void undo_root(struct creation *c);
void close_root(struct creation *c);

/* Wait for the end of a child that failed: its mounts and its place in a cgroup are gone then. */
int await_death(int pidfd);

/* --- by a child in a copy of the spawner's mount namespace ---------------------------------------- */

/* Cover everything with the overlay and go there. */
int attach_root(struct creation *c);
/* Attach `tree` at `path` inside the root; a directory is made where a sparse image lacks it. */
int attach_at(const struct creation *c, int tree, const char *path);
int attach_binds(struct creation *c);

/* Open the first `count` of this process's mount, IPC and UTS namespace as FD_NS_*. */
int open_namespaces(struct creation *c, unsigned count);

#endif
