/* An encoded tree (dsecd/images/erofs/encode.py) laid out as an EROFS image. */
#ifndef DSEC_EROFS_LAYOUT_H
#define DSEC_EROFS_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

struct erofs_inode {
    const uint8_t *record; /* in the encoded tree */
    uint64_t at;           /* of the inode in the image */
    uint64_t size;         /* as stat shows it */
    uint64_t blocks_at;    /* of its whole blocks, when it has any */
    uint32_t blocks;
    uint32_t tail; /* bytes stored behind the inode instead of in a block */
};

struct erofs_plan {
    const uint8_t *tree;
    uint32_t count, devices, shared;
    uint32_t addressed; /* of the devices: those that have addresses of their own */
    uint64_t flat;      /* blocks that need such addresses, counted over all devices */
    uint64_t inodes_at, shared_at, size;
    struct erofs_inode *inodes;
};

/* Check `tree` and decide where everything goes; `plan->size` is the image's length. The tree must
 * stay until the plan is freed. 0, -EBADMSG for a malformed tree, -EFBIG, -ENOMEM; on failure there
 * is nothing to free. */
int erofs_plan(const uint8_t *tree, size_t length, struct erofs_plan *plan);

/* Write the image to `image`, `plan->size` bytes long. */
void erofs_write(const struct erofs_plan *plan, uint8_t *image);

void erofs_free(struct erofs_plan *plan);

#endif
