/* Numbers of the on-disk format (fs/erofs/erofs_fs.h) and of the encoded tree. */
#ifndef DSEC_EROFS_DISK_H
#define DSEC_EROFS_DISK_H

#include <endian.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>

enum {
    BLOCK_BITS = 12,
    BLOCK = 1 << BLOCK_BITS,
    SUPER_AT = 1024,
    SUPER_BYTES = 128,
    SLOT_BYTES = 128, /* of the device table */
    INODE_BYTES = 64, /* the extended form */
    NID_BYTES = 32,
    DIRENT_BYTES = 12,
    INDEX_BYTES = 8,

    LAYOUT_PLAIN = 0,
    LAYOUT_INLINE = 2,
    LAYOUT_CHUNKS = 4,
    INODE_EXTENDED = 1,
    CHUNK_FORMAT = 4 | 0x20, /* 64 KiB = 16 blocks; indexes of 8 bytes */

    COMPAT_CHECKSUM = 1,
    COMPAT_MTIME = 2,
    INCOMPAT_CHUNKS = 4,
    INCOMPAT_DEVICES = 8,
};
#define SUPER_MAGIC 0xE0F5E1E2u

/* Behind an inode that starts at a multiple of NID_BYTES a tail of this length never needs to cross
 * a block, wherever the attributes before it end. */
#define TAIL_MAX (BLOCK - NID_BYTES)

/* The encoded tree. */
enum {
    TREE_HEADER_BYTES = 16,
    TREE_DEVICE_BYTES = 68,
    TREE_RECORD_BYTES = 48,
    TREE_ENTRY_BYTES = 5,
    XATTRS_MAX = 12 + 4 * (0xFFFF - 1),
    NAME_BYTES_MAX = 255,
    TARGET_MAX = 4095,
};

static inline uint16_t get16(const uint8_t *p)
{
    uint16_t value;
    memcpy(&value, p, sizeof value);
    return le16toh(value);
}

static inline uint32_t get32(const uint8_t *p)
{
    uint32_t value;
    memcpy(&value, p, sizeof value);
    return le32toh(value);
}

static inline uint64_t get64(const uint8_t *p)
{
    uint64_t value;
    memcpy(&value, p, sizeof value);
    return le64toh(value);
}

static inline void put16(uint8_t *p, uint16_t value)
{
    value = htole16(value);
    memcpy(p, &value, sizeof value);
}

static inline void put32(uint8_t *p, uint32_t value)
{
    value = htole32(value);
    memcpy(p, &value, sizeof value);
}

static inline void put64(uint8_t *p, uint64_t value)
{
    value = htole64(value);
    memcpy(p, &value, sizeof value);
}

static inline uint64_t align(uint64_t value, uint64_t to)
{
    return (value + to - 1) & ~(to - 1);
}

/* One inode of the encoded tree. */
struct record {
    uint16_t mode;
    uint32_t place; /* a device's number, or the block of a flat file, counted over all devices */
    uint32_t xattr_bytes, count;
    uint64_t size;
    const uint8_t *xattrs, *body;
};

static inline struct record read_record(const uint8_t *p)
{
    struct record record = {
        .mode = get16(p),
        .size = get64(p + 28),
        .place = get32(p + 36),
        .xattr_bytes = get32(p + 40),
        .count = get32(p + 44),
        .xattrs = p + TREE_RECORD_BYTES,
    };
    record.body = record.xattrs + record.xattr_bytes;
    return record;
}

/* A file of one block may have no index. */
static inline bool is_flat(const struct record *record)
{
    return S_ISREG(record->mode) && record->size && !record->count;
}

#endif
