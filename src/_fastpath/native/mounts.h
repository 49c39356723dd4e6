/* Mounts by the new API (fsopen, fsmount, open_tree, move_mount, mount_setattr). */
#ifndef DSEC_NATIVE_MOUNTS_H
#define DSEC_NATIVE_MOUNTS_H

#include <stdbool.h>
#include <stdint.h>

struct mount_option {
    const char *key;
    const char *value; /* NULL: a flag */
};

/* A new, detached mount of a file system of `type`. `attributes` are MOUNT_ATTR_*. */
int make_mount(const char *type, const char *source, const struct mount_option *options,
               int count, unsigned attributes, const char **step);

/* A read-only, nodev EROFS mount of the file `image`, with its blob `devices` in order. File
 * backed: no loop device. `direct` reads past the page cache of the files, which is right where they are
 * served by another program and wrong where they lie on a disk. */
int mount_erofs(const char *image, const char *const *devices, int count, bool direct,
                const char **step);

#endif
