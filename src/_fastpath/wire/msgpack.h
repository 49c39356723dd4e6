/* A strict, bounded msgpack codec without allocation (https://github.com/msgpack/msgpack/blob/master/spec.md).
 *
 * The reader works on a complete buffer and hands out pointers into it; nothing is copied. It is
 * sticky: after the first malformed or unexpected byte `failed` is set, every later call returns
 * false (or zero) and reads nothing, so a caller may read a whole map and check once at the end.
 * Strict means: no truncated value, no reserved byte 0xc1, no container that claims more elements
 * than bytes are left, nesting of at most MP_DEPTH when skipping, map keys are strings.
 *
 * The writer fills a caller's buffer; `overflow` is sticky and nothing is written past `end`.
 */
#ifndef DSEC_MSGPACK_H
#define DSEC_MSGPACK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MP_DEPTH 32

enum mp_type {
    MP_NIL,
    MP_BOOL,
    MP_UINT, /* u.u; every integer that is >= 0 */
    MP_INT,  /* u.i; negative integers only */
    MP_FLOAT,
    MP_STR, /* u.bytes */
    MP_BIN, /* u.bytes */
    MP_ARRAY, /* u.count elements follow */
    MP_MAP,   /* u.count pairs follow */
    MP_EXT,   /* u.bytes, ext_type */
};

struct mp_bytes {
    const uint8_t *p;
    size_t n;
};

struct mp_value {
    enum mp_type type;
    int8_t ext_type;
    union {
        bool b;
        uint64_t u;
        int64_t i;
        double f;
        uint32_t count;
        struct mp_bytes bytes;
    } u;
};

struct mp_reader {
    const uint8_t *p;
    const uint8_t *end;
    bool failed;
};

static inline struct mp_reader mp_reader_of(const void *data, size_t n)
{
    const uint8_t *p = data;
    return (struct mp_reader){ .p = p, .end = n ? p + n : p }; /* NULL + 0 is undefined in C */
}

/* True when everything was read and nothing was wrong. */
static inline bool mp_finished(const struct mp_reader *r)
{
    return !r->failed && r->p == r->end;
}

/* Read the next head; scalars and byte strings whole, containers up to their first element. */
bool mp_next(struct mp_reader *r, struct mp_value *v);
/* Type of the next value without consuming it; false at the end or on an invalid byte. */
bool mp_peek(const struct mp_reader *r, enum mp_type *type);
/* Skip one complete value (bounded depth); the raw form sets `raw` to its encoded bytes. */
bool mp_skip(struct mp_reader *r);
bool mp_raw(struct mp_reader *r, struct mp_bytes *raw);
/* True and consumed when the next value is nil; otherwise false and nothing happens. */
bool mp_take_nil(struct mp_reader *r);

/* Typed reads: a value of another type fails the reader. */
uint64_t mp_get_u64(struct mp_reader *r);
int64_t mp_get_i64(struct mp_reader *r);
bool mp_get_bool(struct mp_reader *r);
double mp_get_f64(struct mp_reader *r); /* accepts integers: encoders shorten 5.0 to 5 at will */
struct mp_bytes mp_get_str(struct mp_reader *r);
struct mp_bytes mp_get_bytes(struct mp_reader *r); /* str or bin: paths and content */
uint32_t mp_get_array(struct mp_reader *r);
uint32_t mp_get_map(struct mp_reader *r);

bool mp_equal(struct mp_bytes a, const char *text);

struct mp_writer {
    uint8_t *start;
    uint8_t *p;
    uint8_t *end;
    bool overflow;
};

static inline struct mp_writer mp_writer_of(void *data, size_t n)
{
    return (struct mp_writer){ .start = data, .p = data, .end = (uint8_t *)data + n };
}

static inline size_t mp_written(const struct mp_writer *w)
{
    return (size_t)(w->p - w->start);
}

void mp_put_nil(struct mp_writer *w);
void mp_put_bool(struct mp_writer *w, bool value);
void mp_put_u64(struct mp_writer *w, uint64_t value);
void mp_put_i64(struct mp_writer *w, int64_t value);
void mp_put_f64(struct mp_writer *w, double value);
void mp_put_array(struct mp_writer *w, uint32_t count);
void mp_put_map(struct mp_writer *w, uint32_t count);
void mp_put_text(struct mp_writer *w, const char *text); /* a C string as str */
void mp_put_str(struct mp_writer *w, const void *data, size_t n);
void mp_put_bin(struct mp_writer *w, const void *data, size_t n);
void mp_put_bin_head(struct mp_writer *w, size_t n); /* head only: the content follows by itself */
void mp_put_raw(struct mp_writer *w, const void *data, size_t n); /* already encoded */

#endif
