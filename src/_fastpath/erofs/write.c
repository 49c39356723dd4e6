/* The second pass: nothing can fail, every length was checked by the first. */
#include "erofs/crc32c.h"
#include "erofs/disk.h"
#include "erofs/layout.h"

static uint8_t file_type(uint16_t mode)
{
    static const uint8_t types[16] = {
        [S_IFREG >> 12] = 1, [S_IFDIR >> 12] = 2,  [S_IFCHR >> 12] = 3, [S_IFBLK >> 12] = 4,
        [S_IFIFO >> 12] = 5, [S_IFSOCK >> 12] = 6, [S_IFLNK >> 12] = 7,
    };
    return types[mode >> 12];
}

/* Write the entries that fit in one block, `count` of them. */
static void write_entries(const struct erofs_plan *plan, const uint8_t *entry, uint32_t count,
                          uint8_t *block)
{
    uint32_t name_at = count * DIRENT_BYTES;
    for (uint32_t i = 0; i < count; i++) {
        const struct erofs_inode *inode = &plan->inodes[get32(entry)];
        uint32_t length = entry[4];
        uint8_t *dirent = block + i * DIRENT_BYTES;
        put64(dirent, inode->at / NID_BYTES);
        put16(dirent + 8, (uint16_t)name_at);
        dirent[10] = file_type(get16(inode->record));
        memcpy(block + name_at, entry + TREE_ENTRY_BYTES, length);
        name_at += length;
        entry += TREE_ENTRY_BYTES + length;
    }
}

static void write_directory(const struct erofs_plan *plan, const struct erofs_inode *inode,
                            const struct record *record, uint8_t *blocks, uint8_t *tail)
{
    const uint8_t *entry = record->body;
    uint32_t left = record->count, written = 0;
    while (left) {
        const uint8_t *first = entry;
        uint32_t count = 0, used = 0;
        while (count < left && used + DIRENT_BYTES + entry[4] <= BLOCK) {
            used += DIRENT_BYTES + entry[4];
            entry += TREE_ENTRY_BYTES + entry[4];
            count++;
        }
        uint8_t *target = written < inode->blocks ? blocks + (uint64_t)written * BLOCK : tail;
        write_entries(plan, first, count, target);
        left -= count;
        written++;
    }
}

static void write_body(const struct erofs_plan *plan, const struct erofs_inode *inode,
                       const struct record *record, uint8_t *image)
{
    uint64_t behind = inode->at + INODE_BYTES + record->xattr_bytes;
    uint8_t *blocks = image + inode->blocks_at;

    memcpy(image + inode->at + INODE_BYTES, record->xattrs, record->xattr_bytes);
    if (S_ISREG(record->mode))
        memcpy(image + align(behind, INDEX_BYTES), record->body,
               (uint64_t)record->count * INDEX_BYTES);
    else if (S_ISLNK(record->mode))
        memcpy(inode->blocks ? blocks : image + behind, record->body, record->count);
    else if (S_ISDIR(record->mode))
        write_directory(plan, inode, record, blocks, image + behind);
}

static void write_inode(const struct erofs_plan *plan, uint32_t number, uint8_t *image)
{
    const struct erofs_inode *inode = &plan->inodes[number];
    const uint8_t *p = inode->record;
    struct record record = read_record(p);
    uint8_t *disk = image + inode->at;
    bool chunks = S_ISREG(record.mode) && record.count;
    int layout = chunks ? LAYOUT_CHUNKS : inode->tail ? LAYOUT_INLINE : LAYOUT_PLAIN;
    uint32_t place = record.place;

    if (is_flat(&record))
        place += (uint32_t)(plan->size >> BLOCK_BITS);
    else if (chunks)
        place = CHUNK_FORMAT;
    else if (inode->blocks)
        place = (uint32_t)(inode->blocks_at >> BLOCK_BITS);
    put16(disk, (uint16_t)(layout << 1 | INODE_EXTENDED));
    put16(disk + 2, record.xattr_bytes ? (uint16_t)((record.xattr_bytes - 12) / 4 + 1) : 0);
    put16(disk + 4, record.mode);
    put64(disk + 8, inode->size);
    put32(disk + 16, place);
    put32(disk + 20, number + 1);
    memcpy(disk + 24, p + 4, 8);        /* uid, gid */
    memcpy(disk + 32, p + 12, 8 + 4 + 4); /* seconds, nanoseconds, links */
    write_body(plan, inode, &record, image);
}

static void write_super(const struct erofs_plan *plan, uint8_t *image)
{
    uint8_t *super = image + SUPER_AT;
    put32(super, SUPER_MAGIC);
    put32(super + 8, COMPAT_CHECKSUM | COMPAT_MTIME);
    super[12] = BLOCK_BITS;
    put16(super + 14, (uint16_t)(plan->inodes[0].at / NID_BYTES));
    put64(super + 16, plan->count);
    put32(super + 36, (uint32_t)(plan->size >> BLOCK_BITS));
    put32(super + 44, plan->shared ? (uint32_t)(plan->shared_at >> BLOCK_BITS) : 0);
    put32(super + 80, INCOMPAT_CHUNKS | INCOMPAT_DEVICES);
    put16(super + 86, (uint16_t)plan->devices);
    put16(super + 88, (SUPER_AT + SUPER_BYTES) / SLOT_BYTES);
}

/* The kernel finds the device of a file without indexes by the addresses given here; those that
 * reach no further share the last one, which no file names. Without its devices it takes such an
 * image for one with the blobs behind it and looks there: beyond the end of the image that is EIO,
 * whereas 0 would show the image's own blocks as file content. */
static void write_devices(const struct erofs_plan *plan, uint8_t *image)
{
    const uint8_t *device = plan->tree + TREE_HEADER_BYTES;
    uint8_t *slot = image + SUPER_AT + SUPER_BYTES;
    uint32_t address = (uint32_t)(plan->size >> BLOCK_BITS);
    for (uint32_t i = 0; i < plan->devices; i++) {
        memcpy(slot, device, 64 + 4); /* tag, blocks */
        put32(slot + 68, address);
        if (i < plan->addressed)
            address += get32(device + 64);
        device += TREE_DEVICE_BYTES;
        slot += SLOT_BYTES;
    }
}

void erofs_write(const struct erofs_plan *plan, uint8_t *image)
{
    memset(image, 0, plan->size);
    write_devices(plan, image);
    for (uint32_t i = 0; i < plan->count; i++)
        write_inode(plan, i, image);
    const uint8_t *devices = plan->tree + TREE_HEADER_BYTES;
    memcpy(image + plan->shared_at, devices + (uint64_t)plan->devices * TREE_DEVICE_BYTES,
           plan->shared);
    write_super(plan, image);
    put32(image + SUPER_AT + 4, crc32c(image + SUPER_AT, BLOCK - SUPER_AT));
}
