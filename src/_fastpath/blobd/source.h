/* Where the bytes of a blob come from: a file of a mounted store, or an object behind HTTP. */
#ifndef DSEC_BLOBD_SOURCE_H
#define DSEC_BLOBD_SOURCE_H

#include <stddef.h>
#include <stdint.h>

#include "wire/msgpack.h"

enum source_kind { SOURCE_NONE, SOURCE_FILE, SOURCE_HTTP };

struct source {
    enum source_kind kind;
    char *location;    /* path or URL */
    char *region;      /* of AWS signature version 4; NULL: requests are not signed */
    char *credentials; /* file in the format of ~/.aws/credentials */
    char *profile;     /* section of that file */
    char *authorities; /* PEM file of certificate authorities besides the system's; NULL: none */
};

/* What a failed attempt says about the next one. */
enum fault_kind {
    FAULT_NONE,
    FAULT_PASSING, /* no answer, a broken connection, 5xx: try until the deadline */
    FAULT_LASTING, /* no such object, refused, damaged content: a few tries */
};

struct fault {
    enum fault_kind kind;
    char text[200];
};

struct reader; /* a connection, for one request at a time */

/* How long an answer took: until its first bytes, and from then on (0: too little to tell). */
struct pace {
    uint64_t first_ns, rest_ns;
};

/* Told how many of the bytes are there, each time more came; not of every source. */
typedef void (*source_progress)(void *argument, size_t filled);

/* From the map of dsecd.images.stores.abc.Source; false: not a source that can be read from here. */
bool source_read_description(struct mp_reader *r, struct source *source);
void source_free(struct source *source);
/* False: no memory. */
bool source_copy(struct source *copy, const struct source *source);

/* Add a reader to those that are free; false: no memory. */
bool reader_add(void);
/* The free one that was used last: its connection is the most likely to be open. Whoever calls has
 * added one before. */
struct reader *reader_take(void);
void reader_give(struct reader *reader);
/* Read exactly `size` bytes at `offset`. */
struct pace source_read(struct reader *reader, const struct source *source, uint64_t offset,
                        uint8_t *data, size_t size, uint64_t timeout_ns, source_progress progress,
                        void *argument, struct fault *fault);

#endif
