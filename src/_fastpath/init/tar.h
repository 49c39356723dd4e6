/* POSIX.1-1988 ustar header with the POSIX.1-2001 pax extension (pax(1), section "ustar"). */
#ifndef DSEC_TAR_H
#define DSEC_TAR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

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

/* --- tar_stream.c: an archive that goes to OUT_FD; one in a process, which ends when nobody reads it --- */

bool tar_begin(void); /* false: no memory */
uint64_t tar_end(void); /* the archive's size */
void tar_put(const void *data, size_t n); /* `data` NULL: zeros */
void tar_pad(uint64_t size); /* to the end of the block in which `size` bytes end */
/* `left` bytes of the file, zeros where it has become shorter; false and errno. */
bool tar_put_content(int fd, uint64_t left);
void tar_octal(char *field, int width, uint64_t value);
void tar_put_header(struct tar_header *h);
/* The records that hold for the entry after them. */
void tar_put_pax(const char *records, size_t n);
/* One record of a pax header, written to `out`; its size. */
size_t tar_record(char *out, const char *key, const char *value, size_t n);
size_t tar_record_number(char *out, const char *key, uint64_t value);
/* The first name under which a file with several was sent; NULL: this is the first. */
const char *tar_earlier_name(const struct stat *st, const char *name);

#endif
