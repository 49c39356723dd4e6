/* POSIX.1-1988 ustar header with the POSIX.1-2001 pax extension (pax(1), section "ustar"). */
#ifndef DSEC_TAR_H
#define DSEC_TAR_H

#include <stdint.h>

#define TAR_BLOCK 512

struct tar_header {
    char name[100], mode[8], uid[8], gid[8], size[12], mtime[12], checksum[8], type, link[100];
    char magic[6], version[2], user[32], group[32], major[8], minor[8], prefix[155], pad[12];
};

_Static_assert(sizeof(struct tar_header) == TAR_BLOCK, "a tar header is one block");

static inline uint32_t tar_checksum(const struct tar_header *h)
{
    const uint8_t *p = (const uint8_t *)h;
    uint32_t sum = 0;
    for (int i = 0; i < TAR_BLOCK; i++)
        sum += i >= 148 && i < 156 ? ' ' : p[i];
    return sum;
}

#endif
