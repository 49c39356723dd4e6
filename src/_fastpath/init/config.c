#include "config.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "limits.h"
#include "loop.h"

#define CONFIG_MAX (1u << 20)

struct config config = {
    .caps = UINT64_MAX,
    .output_limit = 64u << 20,
    .spool_limit = 256u << 20,
};

static bool read_env(struct mp_reader *r)
{
    const uint8_t *start = r->p;
    uint32_t n = mp_get_map(r);
    for (uint32_t i = 0; i < n; i++) {
        mp_get_str(r);
        mp_get_str(r);
    }
    config.env = (struct mp_bytes){ start, (size_t)(r->p - start) };
    return !r->failed;
}

/* [accesses handled, [[path, accesses], ...]], as confine.c reads it. */
static bool read_landlock(struct mp_reader *r)
{
    const uint8_t *start = r->p;
    bool good = mp_get_array(r) == 2;
    mp_get_u64(r);
    for (uint32_t left = mp_get_array(r); left && good && !r->failed; left--) {
        good = mp_get_array(r) == 2;
        struct mp_bytes path = mp_get_bytes(r);
        good = good && path.n && path.n < MAX_PATH && path.p[0] == '/' && !memchr(path.p, 0, path.n);
        mp_get_u64(r);
    }
    config.landlock = (struct mp_bytes){ start, (size_t)(r->p - start) };
    return good && !r->failed;
}

static bool read_key(struct mp_reader *r, struct mp_bytes key)
{
    if (mp_equal(key, "env"))
        return read_env(r);
    if (mp_equal(key, "landlock"))
        return read_landlock(r);
    if (mp_equal(key, "user"))
        config.user = mp_get_str(r);
    else if (mp_equal(key, "workdir"))
        config.workdir = mp_get_bytes(r);
    else if (mp_equal(key, "caps"))
        config.caps = mp_get_u64(r);
    else if (mp_equal(key, "seccomp"))
        config.seccomp = mp_get_bytes(r);
    else if (mp_equal(key, "no_new_privs"))
        config.no_new_privs = mp_get_bool(r);
    else if (mp_equal(key, "output_limit"))
        config.output_limit = mp_get_u64(r);
    else if (mp_equal(key, "spool_limit"))
        config.spool_limit = mp_get_u64(r);
    else if (mp_equal(key, "nofile"))
        config.nofile = mp_get_u64(r);
    else if (mp_equal(key, "oom_score_adj"))
        config.oom_score_adj = (int)mp_get_i64(r);
    else if (mp_equal(key, "apparmor"))
        config.apparmor = mp_get_str(r);
    else if (mp_equal(key, "sandbox"))
        config.sandbox = mp_get_str(r);
    else
        return false;
    return !r->failed;
}

const char *config_parse(struct mp_bytes text)
{
    struct mp_reader r = mp_reader_of(text.p, text.n);
    uint32_t n = mp_get_map(&r);
    for (uint32_t i = 0; i < n && !r.failed; i++)
        if (!read_key(&r, mp_get_str(&r)))
            return "unknown or malformed key in the configuration";
    if (!mp_finished(&r))
        return "the configuration is not one msgpack map";
    if (config.seccomp.n % 8 || config.seccomp.n / 8 > 4096)
        return "seccomp is not an array of at most 4096 sock_filter";
    if (config.user.n >= MAX_NAME || config.workdir.n >= MAX_PATH / 2)
        return "user or workdir is too long";
    if (config.apparmor.n >= MAX_NAME)
        return "the name of the AppArmor profile is too long";
    if (config.oom_score_adj < -1000 || config.oom_score_adj > 1000)
        return "oom_score_adj is out of range";
    return NULL;
}

const char *config_read(int fd)
{
    uint8_t *text = map_alloc(CONFIG_MAX);
    size_t n = 0;
    if (!text)
        return "no memory for the configuration";
    while (n < CONFIG_MAX) {
        ssize_t got = read(fd, text + n, CONFIG_MAX - n);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return "the configuration cannot be read";
        if (got == 0)
            break;
        n += (size_t)got;
    }
    close(fd);
    if (n == CONFIG_MAX)
        return "the configuration is too large";
    return config_parse((struct mp_bytes){ text, n });
}
