/* The first pass: every length of the tree is checked here, and every place in the image decided.
 *
 * superblock, device table, inodes each with its attributes and with what fits behind it, then the
 * whole blocks of directories and long links, then the shared attributes. The inodes come first
 * because the superblock has only 16 bits for the root's number. */
#include "erofs/layout.h"

#include <errno.h>
#include <stdlib.h>

#include "erofs/disk.h"

/* Block addresses have 32 bits, and one of them means "none". */
#define ADDRESS_END UINT32_MAX
#define IMAGE_MAX ((uint64_t)ADDRESS_END << BLOCK_BITS)

struct cursor {
    const uint8_t *p, *end;
};

static const uint8_t *take(struct cursor *cursor, uint64_t bytes)
{
    if (bytes > (uint64_t)(cursor->end - cursor->p))
        return NULL;
    const uint8_t *taken = cursor->p;
    cursor->p += bytes;
    return taken;
}

/* Check the entries of a directory and find out how many bytes they need: each block has the fixed
 * parts of its entries first and then their names, so an entry never crosses a block. */
static int measure_directory(struct cursor *cursor, const struct record *record, uint32_t inodes,
                             struct erofs_inode *inode)
{
    const uint8_t *before = NULL;
    uint64_t blocks = 0;
    uint32_t used = 0, length_before = 0;

    if (record->count < 2)
        return -EBADMSG;
    for (uint32_t i = 0; i < record->count; i++) {
        const uint8_t *entry = take(cursor, TREE_ENTRY_BYTES);
        const uint8_t *name = entry ? take(cursor, entry[4]) : NULL;
        if (!name || entry[4] == 0 || get32(entry) >= inodes)
            return -EBADMSG;
        uint32_t length = entry[4];
        /* The kernel searches by halves: names out of order could not be found. */
        if (before) {
            int order = memcmp(before, name, length < length_before ? length : length_before);
            if (order > 0 || (order == 0 && length_before >= length))
                return -EBADMSG;
        }
        if (used + DIRENT_BYTES + length > BLOCK) {
            blocks++;
            used = 0;
        }
        used += DIRENT_BYTES + length;
        before = name;
        length_before = length;
    }
    inode->size = (blocks << BLOCK_BITS) + used;
    return 0;
}

static int measure_file(struct cursor *cursor, const struct record *record,
                        struct erofs_plan *plan)
{
    if (is_flat(record)) {
        if (plan->flat <= record->place)
            plan->flat = (uint64_t)record->place + 1;
        return record->size <= BLOCK ? 0 : -EBADMSG;
    }
    bool possible = record->size || !record->count;
    return possible && take(cursor, (uint64_t)record->count * INDEX_BYTES) ? 0 : -EBADMSG;
}

static int measure(struct cursor *cursor, struct erofs_plan *plan, struct erofs_inode *inode)
{
    inode->record = take(cursor, TREE_RECORD_BYTES);
    if (!inode->record)
        return -EBADMSG;
    struct record record = read_record(inode->record);
    if (record.xattr_bytes % 4 || record.xattr_bytes > XATTRS_MAX ||
        (record.xattr_bytes && record.xattr_bytes < 12) || !take(cursor, record.xattr_bytes))
        return -EBADMSG;
    inode->size = record.size;
    if (S_ISDIR(record.mode))
        return measure_directory(cursor, &record, plan->count, inode);
    if (S_ISREG(record.mode))
        return measure_file(cursor, &record, plan);
    if (S_ISLNK(record.mode))
        return record.count && record.count <= TARGET_MAX && record.size == record.count &&
                       take(cursor, record.count)
                   ? 0
                   : -EBADMSG;
    return record.count || record.size ? -EBADMSG : 0;
}

/* Place one inode at `*at` or a little behind it; `*at` becomes the end of what belongs to it. */
static void place(struct erofs_inode *inode, uint64_t *at)
{
    struct record record = read_record(inode->record);
    uint64_t start = align(*at, NID_BYTES);
    uint64_t end = start + INODE_BYTES + record.xattr_bytes;

    if (S_ISREG(record.mode) && record.count) {
        end = align(end, INDEX_BYTES) + (uint64_t)record.count * INDEX_BYTES;
    } else if (S_ISDIR(record.mode) || S_ISLNK(record.mode)) {
        inode->blocks = (uint32_t)(inode->size >> BLOCK_BITS);
        inode->tail = (uint32_t)(inode->size % BLOCK);
        if (inode->tail > TAIL_MAX) {
            inode->blocks++;
            inode->tail = 0;
        }
        if (end % BLOCK + inode->tail > BLOCK) {
            uint64_t shift = align(align(end, BLOCK) - end, NID_BYTES);
            start += shift;
            end += shift;
        }
        end += inode->tail;
    }
    inode->at = start;
    *at = end;
}

static int place_all(struct erofs_plan *plan)
{
    uint64_t at = plan->inodes_at;
    for (uint32_t i = 0; i < plan->count; i++)
        place(&plan->inodes[i], &at);
    for (uint32_t i = 0; i < plan->count; i++) {
        struct erofs_inode *inode = &plan->inodes[i];
        if (inode->blocks) {
            inode->blocks_at = align(at, BLOCK);
            at = inode->blocks_at + ((uint64_t)inode->blocks << BLOCK_BITS);
        }
    }
    plan->shared_at = align(at, BLOCK);
    plan->size = align(plan->shared_at + plan->shared, BLOCK);
    bool root_fits = plan->inodes[0].at / NID_BYTES <= UINT16_MAX;
    return root_fits && plan->size < IMAGE_MAX ? 0 : -EFBIG;
}

/* Give the devices addresses behind the image, one after the other, as far as 32 bits go. */
static int address_devices(struct erofs_plan *plan)
{
    const uint8_t *device = plan->tree + TREE_HEADER_BYTES;
    uint64_t first = plan->size >> BLOCK_BITS, at = first;
    while (plan->addressed < plan->devices && at + get32(device + 64) <= ADDRESS_END) {
        at += get32(device + 64);
        device += TREE_DEVICE_BYTES;
        plan->addressed++;
    }
    return plan->flat <= at - first ? 0 : -EBADMSG;
}

static int read_tree(struct cursor *cursor, struct erofs_plan *plan)
{
    for (uint32_t i = 0; i < plan->count; i++) {
        int error = measure(cursor, plan, &plan->inodes[i]);
        if (error)
            return error;
    }
    bool complete = cursor->p == cursor->end;
    return complete && S_ISDIR(get16(plan->inodes[0].record)) ? 0 : -EBADMSG;
}

int erofs_plan(const uint8_t *tree, size_t length, struct erofs_plan *plan)
{
    struct cursor cursor = { tree, tree + length };
    const uint8_t *head = take(&cursor, TREE_HEADER_BYTES);
    if (!head)
        return -EBADMSG;
    *plan = (struct erofs_plan){ .tree = tree, .count = get32(head), .devices = get32(head + 4),
                                 .shared = get32(head + 8) };
    plan->inodes_at = SUPER_AT + SUPER_BYTES + (uint64_t)plan->devices * SLOT_BYTES;
    /* The first check keeps a false count from making us ask for more memory than the tree has. */
    if (!plan->count || plan->count > length / TREE_RECORD_BYTES || plan->devices > UINT16_MAX ||
        plan->shared % 4 ||
        !take(&cursor, (uint64_t)plan->devices * TREE_DEVICE_BYTES) || !take(&cursor, plan->shared))
        return -EBADMSG;
    plan->inodes = calloc(plan->count, sizeof *plan->inodes);
    if (!plan->inodes)
        return -ENOMEM;
    int error = read_tree(&cursor, plan);
    if (!error)
        error = place_all(plan);
    if (!error)
        error = address_devices(plan);
    if (error)
        erofs_free(plan);
    return error;
}

void erofs_free(struct erofs_plan *plan)
{
    free(plan->inodes);
    plan->inodes = NULL;
}
