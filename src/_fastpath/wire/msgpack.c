#include "msgpack.h"

#include <string.h>

static bool fail(struct mp_reader *r)
{
    r->failed = true;
    return false;
}

static bool take(struct mp_reader *r, size_t n, const uint8_t **out)
{
    if (r->failed || (size_t)(r->end - r->p) < n)
        return fail(r);
    *out = r->p;
    r->p += n;
    return true;
}

/* Big-endian unsigned of 1, 2, 4 or 8 bytes. */
static bool take_uint(struct mp_reader *r, size_t width, uint64_t *out)
{
    const uint8_t *b;
    if (!take(r, width, &b))
        return false;
    uint64_t value = 0;
    for (size_t i = 0; i < width; i++)
        value = value << 8 | b[i];
    *out = value;
    return true;
}

static bool read_uint(struct mp_reader *r, size_t width, struct mp_value *v)
{
    v->type = MP_UINT;
    return take_uint(r, width, &v->u.u);
}

static bool read_int(struct mp_reader *r, size_t width, struct mp_value *v)
{
    uint64_t raw;
    if (!take_uint(r, width, &raw))
        return false;
    unsigned shift = 64 - 8 * (unsigned)width;
    int64_t value = (int64_t)(raw << shift) >> shift;
    v->type = value < 0 ? MP_INT : MP_UINT;
    v->u.i = value; /* same bits for a non-negative value read as u.u */
    return true;
}

static bool read_float(struct mp_reader *r, size_t width, struct mp_value *v)
{
    uint64_t raw;
    if (!take_uint(r, width, &raw))
        return false;
    v->type = MP_FLOAT;
    if (width == 4) {
        uint32_t bits = (uint32_t)raw;
        float f;
        memcpy(&f, &bits, sizeof f);
        v->u.f = (double)f;
    } else {
        memcpy(&v->u.f, &raw, sizeof v->u.f);
    }
    return true;
}

static bool read_bytes(struct mp_reader *r, enum mp_type type, uint64_t n, struct mp_value *v)
{
    const uint8_t *b;
    if (!take(r, (size_t)n, &b))
        return false;
    v->type = type;
    v->u.bytes = (struct mp_bytes){ b, (size_t)n };
    return true;
}

static bool read_sized_bytes(struct mp_reader *r, enum mp_type type, size_t width,
                             struct mp_value *v)
{
    uint64_t n;
    return take_uint(r, width, &n) && read_bytes(r, type, n, v);
}

static bool read_count(struct mp_reader *r, enum mp_type type, uint64_t count, struct mp_value *v)
{
    /* Each element takes a byte at least, so a count beyond the rest of the buffer is a lie. */
    uint64_t least = type == MP_MAP ? 2 * count : count;
    if (r->failed || least > (uint64_t)(r->end - r->p))
        return fail(r);
    v->type = type;
    v->u.count = (uint32_t)count;
    return true;
}

static bool read_sized_count(struct mp_reader *r, enum mp_type type, size_t width,
                             struct mp_value *v)
{
    uint64_t count;
    return take_uint(r, width, &count) && read_count(r, type, count, v);
}

static bool read_ext(struct mp_reader *r, uint64_t n, struct mp_value *v)
{
    const uint8_t *kind;
    if (!take(r, 1, &kind))
        return false;
    v->ext_type = (int8_t)*kind;
    return read_bytes(r, MP_EXT, n, v);
}

static bool read_sized_ext(struct mp_reader *r, size_t width, struct mp_value *v)
{
    uint64_t n;
    return take_uint(r, width, &n) && read_ext(r, n, v);
}

bool mp_next(struct mp_reader *r, struct mp_value *v)
{
    const uint8_t *head;
    if (!take(r, 1, &head))
        return false;
    uint8_t b = *head;
    if (b < 0x80) {
        v->type = MP_UINT;
        v->u.u = b;
        return true;
    }
    if (b >= 0xe0) {
        v->type = MP_INT;
        v->u.i = (int8_t)b;
        return true;
    }
    if (b < 0x90)
        return read_count(r, MP_MAP, b & 0x0f, v);
    if (b < 0xa0)
        return read_count(r, MP_ARRAY, b & 0x0f, v);
    if (b < 0xc0)
        return read_bytes(r, MP_STR, b & 0x1f, v);
    switch (b) {
    case 0xc0:
        v->type = MP_NIL;
        return true;
    case 0xc2:
    case 0xc3:
        v->type = MP_BOOL;
        v->u.b = b & 1;
        return true;
    case 0xc4: case 0xc5: case 0xc6:
        return read_sized_bytes(r, MP_BIN, (size_t)1 << (b - 0xc4), v);
    case 0xc7: case 0xc8: case 0xc9:
        return read_sized_ext(r, (size_t)1 << (b - 0xc7), v);
    case 0xca: case 0xcb:
        return read_float(r, b == 0xca ? 4 : 8, v);
    case 0xcc: case 0xcd: case 0xce: case 0xcf:
        return read_uint(r, (size_t)1 << (b - 0xcc), v);
    case 0xd0: case 0xd1: case 0xd2: case 0xd3:
        return read_int(r, (size_t)1 << (b - 0xd0), v);
    case 0xd4: case 0xd5: case 0xd6: case 0xd7: case 0xd8:
        return read_ext(r, (uint64_t)1 << (b - 0xd4), v);
    case 0xd9: case 0xda: case 0xdb:
        return read_sized_bytes(r, MP_STR, (size_t)1 << (b - 0xd9), v);
    case 0xdc: case 0xdd:
        return read_sized_count(r, MP_ARRAY, b == 0xdc ? 2 : 4, v);
    case 0xde: case 0xdf:
        return read_sized_count(r, MP_MAP, b == 0xde ? 2 : 4, v);
    default:
        return fail(r); /* 0xc1 is reserved */
    }
}

bool mp_peek(const struct mp_reader *r, enum mp_type *type)
{
    struct mp_reader copy = *r;
    struct mp_value v;
    if (!mp_next(&copy, &v))
        return false;
    *type = v.type;
    return true;
}

bool mp_skip(struct mp_reader *r)
{
    uint64_t left[MP_DEPTH];
    int depth = 0;
    left[0] = 1;
    while (depth >= 0) {
        if (left[depth] == 0) {
            depth--;
            continue;
        }
        left[depth]--;
        struct mp_value v;
        if (!mp_next(r, &v))
            return false;
        if (v.type != MP_ARRAY && v.type != MP_MAP)
            continue;
        if (depth + 1 == MP_DEPTH)
            return fail(r);
        left[++depth] = v.type == MP_MAP ? 2 * (uint64_t)v.u.count : v.u.count;
    }
    return true;
}

bool mp_raw(struct mp_reader *r, struct mp_bytes *raw)
{
    const uint8_t *start = r->p;
    if (!mp_skip(r))
        return false;
    *raw = (struct mp_bytes){ start, (size_t)(r->p - start) };
    return true;
}

bool mp_take_nil(struct mp_reader *r)
{
    if (r->failed || r->p == r->end || *r->p != 0xc0)
        return false;
    r->p++;
    return true;
}

uint64_t mp_get_u64(struct mp_reader *r)
{
    struct mp_value v;
    if (!mp_next(r, &v))
        return 0;
    if (v.type == MP_UINT)
        return v.u.u;
    fail(r);
    return 0;
}

int64_t mp_get_i64(struct mp_reader *r)
{
    struct mp_value v;
    if (!mp_next(r, &v))
        return 0;
    if (v.type == MP_INT || (v.type == MP_UINT && v.u.u <= INT64_MAX))
        return v.u.i;
    fail(r);
    return 0;
}

bool mp_get_bool(struct mp_reader *r)
{
    struct mp_value v;
    if (!mp_next(r, &v))
        return false;
    if (v.type == MP_BOOL)
        return v.u.b;
    return fail(r);
}

double mp_get_f64(struct mp_reader *r)
{
    struct mp_value v;
    if (!mp_next(r, &v))
        return 0;
    if (v.type == MP_FLOAT)
        return v.u.f;
    if (v.type == MP_UINT)
        return (double)v.u.u;
    if (v.type == MP_INT)
        return (double)v.u.i;
    fail(r);
    return 0;
}

struct mp_bytes mp_get_str(struct mp_reader *r)
{
    struct mp_value v;
    if (!mp_next(r, &v))
        return (struct mp_bytes){ 0 };
    if (v.type == MP_STR)
        return v.u.bytes;
    fail(r);
    return (struct mp_bytes){ 0 };
}

struct mp_bytes mp_get_bytes(struct mp_reader *r)
{
    struct mp_value v;
    if (!mp_next(r, &v))
        return (struct mp_bytes){ 0 };
    if (v.type == MP_STR || v.type == MP_BIN)
        return v.u.bytes;
    fail(r);
    return (struct mp_bytes){ 0 };
}

static uint32_t get_count(struct mp_reader *r, enum mp_type type)
{
    struct mp_value v;
    if (!mp_next(r, &v))
        return 0;
    if (v.type == type)
        return v.u.count;
    fail(r);
    return 0;
}

uint32_t mp_get_array(struct mp_reader *r)
{
    return get_count(r, MP_ARRAY);
}

uint32_t mp_get_map(struct mp_reader *r)
{
    return get_count(r, MP_MAP);
}

bool mp_equal(struct mp_bytes a, const char *text)
{
    return a.n == strlen(text) && memcmp(a.p, text, a.n) == 0;
}

static uint8_t *room(struct mp_writer *w, size_t n)
{
    if (w->overflow || (size_t)(w->end - w->p) < n) {
        w->overflow = true;
        return NULL;
    }
    uint8_t *at = w->p;
    w->p += n;
    return at;
}

static void put_head(struct mp_writer *w, uint8_t head, uint64_t value, size_t width)
{
    uint8_t *at = room(w, 1 + width);
    if (!at)
        return;
    *at++ = head;
    for (size_t i = 0; i < width; i++)
        at[i] = (uint8_t)(value >> (8 * (width - 1 - i)));
}

void mp_put_nil(struct mp_writer *w)
{
    put_head(w, 0xc0, 0, 0);
}

void mp_put_bool(struct mp_writer *w, bool value)
{
    put_head(w, value ? 0xc3 : 0xc2, 0, 0);
}

void mp_put_u64(struct mp_writer *w, uint64_t value)
{
    if (value < 0x80)
        put_head(w, (uint8_t)value, 0, 0);
    else if (value <= UINT8_MAX)
        put_head(w, 0xcc, value, 1);
    else if (value <= UINT16_MAX)
        put_head(w, 0xcd, value, 2);
    else if (value <= UINT32_MAX)
        put_head(w, 0xce, value, 4);
    else
        put_head(w, 0xcf, value, 8);
}

void mp_put_i64(struct mp_writer *w, int64_t value)
{
    if (value >= 0)
        mp_put_u64(w, (uint64_t)value);
    else if (value >= -32)
        put_head(w, (uint8_t)(int8_t)value, 0, 0);
    else if (value >= INT8_MIN)
        put_head(w, 0xd0, (uint64_t)value, 1);
    else if (value >= INT16_MIN)
        put_head(w, 0xd1, (uint64_t)value, 2);
    else if (value >= INT32_MIN)
        put_head(w, 0xd2, (uint64_t)value, 4);
    else
        put_head(w, 0xd3, (uint64_t)value, 8);
}

void mp_put_f64(struct mp_writer *w, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    put_head(w, 0xcb, bits, 8);
}

void mp_put_array(struct mp_writer *w, uint32_t count)
{
    if (count < 16)
        put_head(w, (uint8_t)(0x90 | count), 0, 0);
    else if (count <= UINT16_MAX)
        put_head(w, 0xdc, count, 2);
    else
        put_head(w, 0xdd, count, 4);
}

void mp_put_map(struct mp_writer *w, uint32_t count)
{
    if (count < 16)
        put_head(w, (uint8_t)(0x80 | count), 0, 0);
    else if (count <= UINT16_MAX)
        put_head(w, 0xde, count, 2);
    else
        put_head(w, 0xdf, count, 4);
}

void mp_put_raw(struct mp_writer *w, const void *data, size_t n)
{
    uint8_t *at = room(w, n);
    if (at && n)
        memcpy(at, data, n);
}

void mp_put_str(struct mp_writer *w, const void *data, size_t n)
{
    if (n < 32)
        put_head(w, (uint8_t)(0xa0 | n), 0, 0);
    else if (n <= UINT8_MAX)
        put_head(w, 0xd9, n, 1);
    else if (n <= UINT16_MAX)
        put_head(w, 0xda, n, 2);
    else
        put_head(w, 0xdb, n, 4);
    mp_put_raw(w, data, n);
}

void mp_put_text(struct mp_writer *w, const char *text)
{
    mp_put_str(w, text, strlen(text));
}

void mp_put_bin_head(struct mp_writer *w, size_t n)
{
    if (n <= UINT8_MAX)
        put_head(w, 0xc4, n, 1);
    else if (n <= UINT16_MAX)
        put_head(w, 0xc5, n, 2);
    else
        put_head(w, 0xc6, n, 4);
}

void mp_put_bin(struct mp_writer *w, const void *data, size_t n)
{
    mp_put_bin_head(w, n);
    mp_put_raw(w, data, n);
}
