/* Tables of the fields that a map of arguments may have. */
#ifndef DSEC_FIELDS_H
#define DSEC_FIELDS_H

#include <stddef.h>

#include "../wire/msgpack.h"

enum kind {
    NAME, /* str without NUL, shorter than MAX_NAME */
    PATH, /* bytes without NUL, shorter than MAX_PATH */
    TEXT, /* bytes without NUL */
    DATA, /* bytes */
    FLAG,
    NUMBER,
    SECONDS,
    TEXTS,  /* array of bytes without NUL, kept encoded */
    PAIRS,  /* map of str to str without NUL, kept encoded */
    NUMBERS, /* array of u32, kept encoded */
    RAW,
};

struct field {
    const char *name;
    enum kind kind;
    size_t offset;
    const char *problem;
};

#define FIELD(type, name, member, kind) \
    { name, kind, offsetof(type, member), "field \"" name "\" is malformed" }

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

/* Read a map into the struct `out`; `allowed`: space separated names, NULL for all of `fields`. NULL, or a
 * static text that says what is wrong. */
const char *fields_parse(struct mp_bytes raw, const struct field *fields, size_t n_fields,
                         const char *allowed, void *out);

#endif
