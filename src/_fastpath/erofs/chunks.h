/* Content of a file as chunks: read, holes left out, hashed. */
#ifndef DSEC_EROFS_CHUNKS_H
#define DSEC_EROFS_CHUNKS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { CHUNK_BYTES = 65536, CHUNK_BLOCK = 4096, DIGEST_BYTES = 32, CHUNKS_MAX = 128 };

struct chunk_reader {
    int fd;
    off_t at, end;         /* of the file; `at` is a multiple of CHUNK_BYTES */
    uint8_t *buffer;       /* chunks one after the other, each padded to CHUNK_BLOCK with zeros */
    size_t used, capacity; /* of the buffer */
    size_t count;          /* of chunks that were added */
    struct chunk_found {
        uint64_t holes; /* chunks of zeros before it */
        uint8_t digest[DIGEST_BYTES];
    } chunks[CHUNKS_MAX];
    uint64_t holes; /* at the end */
};

/* Read on until the end, until CHUNKS_MAX chunks were found or until the buffer has no room for
 * one more. Moves the descriptor's offset. -ENODATA: the file is shorter than `end`. */
int read_chunks(struct chunk_reader *reader, const char **step);

#endif
