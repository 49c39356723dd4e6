#include "vm_args.h"

#include <arpa/inet.h>
#include <stdlib.h>
#include <string.h>

#include "fields.h"
#include "limits.h"

#define HOSTNAME_MAX 64 /* HOST_NAME_MAX of Linux */

static const uint8_t *byte(struct mp_bytes text, char wanted)
{
    return text.n ? memchr(text.p, wanted, text.n) : NULL;
}

/* A path below /dev. */
static bool is_device(struct mp_bytes path)
{
    return path.n > 5 && path.n < MAX_NAME && memcmp(path.p, "/dev/", 5) == 0 && !byte(path, 0);
}

static bool good_layers(struct mp_bytes raw)
{
    struct mp_reader r = mp_reader_of(raw.p, raw.n);
    uint32_t n = mp_get_array(&r);
    bool good = n > 0 && n <= VM_LAYERS;
    while (good && n--)
        good = is_device(mp_get_bytes(&r));
    return good;
}

/* Names with one "/" between, none of them "." or "..". */
static bool is_relative(struct mp_bytes path)
{
    bool good = path.n > 0 && path.n < MAX_PATH && !byte(path, 0);
    while (good) {
        const uint8_t *slash = byte(path, '/');
        size_t n = slash ? (size_t)(slash - path.p) : path.n;
        good = n > 0 && n < 256 && !(n <= 2 && memcmp(path.p, "..", n) == 0);
        if (!slash)
            break;
        path = (struct mp_bytes){ slash + 1, path.n - n - 1 };
    }
    return good;
}

struct vm_file vm_next_file(struct mp_reader *r)
{
    struct vm_file file = { .mode = UINT32_MAX };
    if (mp_get_array(r) != 3)
        r->failed = true;
    file.path = mp_get_str(r);
    file.content = mp_get_bytes(r);
    uint64_t mode = mp_get_u64(r);
    if (mode <= 07777)
        file.mode = (uint32_t)mode;
    return file;
}

struct mp_bytes vm_next_layer(struct mp_reader *r)
{
    return mp_get_bytes(r);
}

static bool good_files(struct mp_bytes raw)
{
    struct mp_reader r = mp_reader_of(raw.p, raw.n);
    bool good = true;
    for (uint32_t left = mp_get_array(&r); good && left; left--) {
        struct vm_file file = vm_next_file(&r);
        good = !r.failed && is_relative(file.path) && file.mode != UINT32_MAX;
    }
    return good && mp_finished(&r);
}

/* An address; with `prefix`, "/" and its length must follow. */
static bool read_address(struct mp_bytes raw, bool prefix, struct vm_address *out)
{
    char text[INET6_ADDRSTRLEN + 4], *end;
    if (!raw.n || raw.n >= sizeof text)
        return false;
    memcpy(text, raw.p, raw.n);
    text[raw.n] = 0;
    char *slash = strchr(text, '/');
    if (!slash != !prefix)
        return false;
    if (slash) {
        *slash++ = 0;
        if (*slash < '0' || *slash > '9')
            return false;
        out->prefix = (unsigned)strtoul(slash, &end, 10);
        if (*end)
            return false;
    }
    out->family = strchr(text, ':') ? AF_INET6 : AF_INET;
    return out->prefix <= (out->family == AF_INET6 ? 128 : 32) &&
           inet_pton(out->family, text, out->bytes) == 1;
}

static bool read_addresses(struct mp_bytes raw, bool prefix, struct vm_address *out, unsigned room,
                           unsigned *n_out)
{
    struct mp_reader r = mp_reader_of(raw.p, raw.n);
    uint32_t n = raw.p ? mp_get_array(&r) : 0;
    if (n > room)
        return false;
    for (*n_out = 0; *n_out < n; (*n_out)++)
        if (!read_address(mp_get_bytes(&r), prefix, &out[*n_out]))
            return false;
    return true;
}

static bool read_digit(uint8_t digit, uint8_t *out)
{
    if (digit >= '0' && digit <= '9')
        *out = (uint8_t)(digit - '0');
    else if (digit >= 'a' && digit <= 'f')
        *out = (uint8_t)(digit - 'a' + 10);
    else
        return false;
    return true;
}

/* "02:d5:ec:02:00:01" */
static bool read_mac(struct mp_bytes text, uint8_t out[6])
{
    if (text.n != 17)
        return false;
    for (unsigned i = 0; i < 6; i++) {
        const uint8_t *at = text.p + i * 3;
        uint8_t high, low;
        if (!read_digit(at[0], &high) || !read_digit(at[1], &low) || (i < 5 && at[2] != ':'))
            return false;
        out[i] = (uint8_t)(high << 4 | low);
    }
    return true;
}

static bool read_neighbours(struct mp_bytes raw, struct vm_network *out)
{
    struct mp_reader r = mp_reader_of(raw.p, raw.n);
    uint32_t n = raw.p ? mp_get_array(&r) : 0;
    if (n > VM_NEIGHBOURS)
        return false;
    for (out->n_neighbours = 0; out->n_neighbours < n; out->n_neighbours++) {
        struct vm_neighbour *next = &out->neighbours[out->n_neighbours];
        if (mp_get_array(&r) != 2 || !read_address(mp_get_str(&r), false, &next->address) ||
            !read_mac(mp_get_str(&r), next->mac))
            return false;
    }
    return !r.failed;
}

struct network_fields {
    struct mp_bytes interface, addresses, gateways, neighbours;
    struct opt_u64 mtu;
};

static const char *read_network(struct mp_bytes raw, struct vm_network *out)
{
    static const struct field fields[] = {
        FIELD(struct network_fields, "interface", interface, NAME),
        FIELD(struct network_fields, "addresses", addresses, TEXTS),
        FIELD(struct network_fields, "gateways", gateways, TEXTS),
        FIELD(struct network_fields, "neighbours", neighbours, RAW),
        FIELD(struct network_fields, "mtu", mtu, NUMBER),
    };
    struct network_fields given = { 0 };
    if (fields_parse(raw, fields, COUNT(fields), NULL, &given))
        return "field \"network\" is malformed";
    if (!given.interface.n || given.interface.n >= sizeof out->interface)
        return "field \"network.interface\" is missing or too long";
    memcpy(out->interface, given.interface.p, given.interface.n);
    if (!read_addresses(given.addresses, true, out->addresses, VM_ADDRESSES, &out->n_addresses))
        return "field \"network.addresses\" is not a list of at most 8 ADDRESS/PREFIX";
    if (!read_addresses(given.gateways, false, out->gateways, VM_GATEWAYS, &out->n_gateways))
        return "field \"network.gateways\" is not a list of at most 4 addresses";
    if (!read_neighbours(given.neighbours, out))
        return "field \"network.neighbours\" is not a list of at most 4 [address, MAC]";
    if (given.mtu.set && (given.mtu.value < 68 || given.mtu.value > 65535))
        return "field \"network.mtu\" is not 68 to 65535";
    out->mtu = (unsigned)given.mtu.value;
    return NULL;
}

struct reclaim_fields {
    struct opt_u64 min_age_s, swap_bytes;
};

static const char *read_reclaim(struct mp_bytes raw, struct vm_args *out)
{
    static const struct field fields[] = {
        FIELD(struct reclaim_fields, "min_age_s", min_age_s, NUMBER),
        FIELD(struct reclaim_fields, "swap_bytes", swap_bytes, NUMBER),
    };
    struct reclaim_fields given = { 0 };
    if (fields_parse(raw, fields, COUNT(fields), NULL, &given))
        return "field \"reclaim\" is malformed";
    if (!given.min_age_s.value || given.min_age_s.value > VM_AGE_MAX)
        return "field \"reclaim.min_age_s\" is not 1 to 86400";
    out->min_age_s = (uint32_t)given.min_age_s.value;
    out->swap_bytes = given.swap_bytes.value;
    return NULL;
}

static const char *check_clock(const struct vm_args *args)
{
    if (!args->time_ns.set || args->time_ns.value > INT64_MAX)
        return "field \"time_ns\" is missing or out of range";
    return args->entropy.n == VM_ENTROPY ? NULL : "field \"entropy\" is not 64 bytes";
}

/* What makes a machine one of its own. */
static const char *check_identity(struct vm_args *args)
{
    if (args->files.p && !good_files(args->files))
        return "field \"files\" is not a list of [relative path, content, mode]";
    if (!args->hostname.n || args->hostname.n > HOSTNAME_MAX)
        return "field \"hostname\" is missing or longer than 64 bytes";
    if (!args->config.n)
        return "field \"config\" is missing";
    const char *problem =
        args->network_raw.p ? read_network(args->network_raw, &args->network) : NULL;
    return problem ? problem : check_clock(args);
}

static const char *check_root(const struct vm_args *args, bool service)
{
    if (service)
        return args->layers.p || args->upper.p ? "this machine has a root: it takes no layers" : NULL;
    if (!args->layers.p || !good_layers(args->layers))
        return "field \"layers\" is not a list of 1 to 32 paths below /dev";
    return is_device(args->upper) ? NULL : "field \"upper\" is not a path below /dev";
}

const char *args_vm_begin(struct mp_bytes raw, bool service, struct vm_args *out)
{
    static const struct field fields[] = {
        FIELD(struct vm_args, "layers", layers, TEXTS),
        FIELD(struct vm_args, "dax", dax, FLAG),
        FIELD(struct vm_args, "upper", upper, NAME),
        FIELD(struct vm_args, "files", files, RAW),
        FIELD(struct vm_args, "hostname", hostname, NAME),
        FIELD(struct vm_args, "pids", pids, NUMBER),
        FIELD(struct vm_args, "network", network_raw, RAW),
        FIELD(struct vm_args, "reclaim", reclaim_raw, RAW),
        FIELD(struct vm_args, "time_ns", time_ns, NUMBER),
        FIELD(struct vm_args, "entropy", entropy, DATA),
        FIELD(struct vm_args, "config", config, DATA),
    };
    memset(out, 0, sizeof *out);
    const char *problem = fields_parse(raw, fields, COUNT(fields), NULL, out);
    if (!problem)
        problem = check_root(out, service);
    if (problem)
        return problem;
    if (!out->pids.set || !out->pids.value)
        return "field \"pids\" is missing or 0";
    problem = out->reclaim_raw.p ? read_reclaim(out->reclaim_raw, out) : NULL;
    return problem ? problem : check_identity(out);
}

const char *args_vm_renew(struct mp_bytes raw, struct vm_args *out)
{
    static const struct field fields[] = {
        FIELD(struct vm_args, "files", files, RAW),
        FIELD(struct vm_args, "hostname", hostname, NAME),
        FIELD(struct vm_args, "network", network_raw, RAW),
        FIELD(struct vm_args, "time_ns", time_ns, NUMBER),
        FIELD(struct vm_args, "entropy", entropy, DATA),
        FIELD(struct vm_args, "config", config, DATA),
    };
    memset(out, 0, sizeof *out);
    const char *problem = fields_parse(raw, fields, COUNT(fields), NULL, out);
    return problem ? problem : check_identity(out);
}

const char *args_vm_clock(struct mp_bytes raw, struct vm_args *out)
{
    static const struct field fields[] = {
        FIELD(struct vm_args, "time_ns", time_ns, NUMBER),
        FIELD(struct vm_args, "entropy", entropy, DATA),
    };
    memset(out, 0, sizeof *out);
    const char *problem = fields_parse(raw, fields, COUNT(fields), NULL, out);
    return problem ? problem : check_clock(out);
}
