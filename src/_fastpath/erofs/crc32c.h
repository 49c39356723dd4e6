/* The Castagnoli checksum as EROFS stores it: no final inversion. Half a block once per image, so
 * the bitwise form is quick enough. */
#ifndef DSEC_EROFS_CRC32C_H
#define DSEC_EROFS_CRC32C_H

#include <stddef.h>
#include <stdint.h>

static inline uint32_t crc32c(const uint8_t *p, size_t length)
{
    uint32_t value = UINT32_MAX;
    while (length--) {
        value ^= *p++;
        for (int bit = 0; bit < 8; bit++)
            value = value >> 1 ^ (value & 1 ? 0x82F63B78 : 0);
    }
    return value;
}

#endif
