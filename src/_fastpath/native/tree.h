/* Directories, removed and made without ever following a symbolic link. */
#ifndef DSEC_NATIVE_TREE_H
#define DSEC_NATIVE_TREE_H

/* Remove `name` below the directory `at` with everything in it. Depth is not limited and costs one
 * descriptor; a missing name is success. Mount points are not crossed (-EBUSY). Stops at the first
 * directory it cannot empty. */
int remove_tree(int at, const char *name);

/* Remove the cgroup directory `name` below `at` and its child groups (plain files stay: the
 * kernel owns them). -EBUSY while a process is left. A missing name is success. */
int remove_cgroup(int at, const char *name);

#endif
