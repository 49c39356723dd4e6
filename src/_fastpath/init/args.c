#include "args.h"

#include <string.h>

#include "fields.h"
#include "limits.h"

static bool clean(struct mp_bytes text, size_t limit)
{
    return text.p && text.n < limit && !memchr(text.p, 0, text.n);
}

static bool read_elements(struct mp_reader *r, enum kind kind, struct mp_bytes *out)
{
    const uint8_t *start = r->p;
    uint32_t n = kind == PAIRS ? mp_get_map(r) : mp_get_array(r);
    for (uint32_t i = 0; i < n && !r->failed; i++) {
        if (kind == NUMBERS) {
            r->failed |= mp_get_u64(r) > UINT32_MAX - 1;
        } else if (kind == TEXTS) {
            r->failed |= !clean(mp_get_bytes(r), MAX_FRAME);
        } else {
            struct mp_bytes key = mp_get_str(r);
            r->failed |= !clean(key, MAX_FRAME) || !key.n || memchr(key.p, '=', key.n) != NULL;
            r->failed |= !clean(mp_get_str(r), MAX_FRAME);
        }
    }
    *out = (struct mp_bytes){ start, (size_t)(r->p - start) };
    return !r->failed;
}

static bool read_field(struct mp_reader *r, const struct field *field, void *out)
{
    void *at = (char *)out + field->offset;
    struct mp_bytes *bytes = at;
    if (mp_take_nil(r))
        return true;
    switch (field->kind) {
    case NAME:
        *bytes = mp_get_str(r);
        return clean(*bytes, MAX_NAME);
    case PATH:
        *bytes = mp_get_bytes(r);
        return clean(*bytes, MAX_PATH);
    case TEXT:
        *bytes = mp_get_bytes(r);
        return clean(*bytes, MAX_FRAME);
    case DATA:
        *bytes = mp_get_bytes(r);
        return !r->failed;
    case FLAG:
        *(bool *)at = mp_get_bool(r);
        return !r->failed;
    case NUMBER:
        *(struct opt_u64 *)at = (struct opt_u64){ true, mp_get_u64(r) };
        return !r->failed;
    case SECONDS:
        *(struct opt_f64 *)at = (struct opt_f64){ true, mp_get_f64(r) };
        return !r->failed && ((struct opt_f64 *)at)->value >= 0;
    case RAW:
        return mp_raw(r, bytes);
    default:
        return read_elements(r, field->kind, bytes);
    }
}

/* Is `name` one of the words of `list`? */
static bool listed(struct mp_bytes name, const char *list)
{
    for (const char *p = list; *p;) {
        size_t n = strcspn(p, " ");
        if (n == name.n && memcmp(p, name.p, n) == 0)
            return true;
        p += n + (p[n] == ' ');
    }
    return false;
}

const char *fields_parse(struct mp_bytes raw, const struct field *fields, size_t n_fields,
                         const char *allowed, void *out)
{
    struct mp_reader r = mp_reader_of(raw.p, raw.n);
    uint32_t n = mp_get_map(&r);
    for (uint32_t i = 0; i < n; i++) {
        struct mp_bytes key = mp_get_str(&r);
        size_t k = 0;
        while (k < n_fields && !(key.p && mp_equal(key, fields[k].name)))
            k++;
        if (k == n_fields || (allowed && !listed(key, allowed)))
            return "the arguments have a field that this operation does not know";
        if (!read_field(&r, &fields[k], out))
            return fields[k].problem;
    }
    return mp_finished(&r) ? NULL : "the arguments are not one map";
}

static const char *parse_pty(struct exec_args *out)
{
    struct command_args size = { 0 };
    static const struct field fields[] = {
        FIELD(struct command_args, "rows", rows, NUMBER),
        FIELD(struct command_args, "cols", cols, NUMBER),
    };
    const char *problem = fields_parse(out->pty_raw, fields, COUNT(fields), NULL, &size);
    uint64_t rows = size.rows.set ? size.rows.value : 24;
    uint64_t cols = size.cols.set ? size.cols.value : 80;
    if (problem || !rows || !cols || rows > 65535 || cols > 65535)
        return "field \"pty\" is malformed";
    out->pty = true;
    out->rows = (uint16_t)rows;
    out->cols = (uint16_t)cols;
    return NULL;
}

const char *args_exec(struct mp_bytes raw, struct exec_args *out)
{
    static const struct field fields[] = {
        FIELD(struct exec_args, "cid", cid, NAME),
        FIELD(struct exec_args, "argv", argv, TEXTS),
        FIELD(struct exec_args, "shell", shell, TEXT),
        FIELD(struct exec_args, "interpreter", interpreter, NAME),
        FIELD(struct exec_args, "session", session, NAME),
        FIELD(struct exec_args, "env", env, PAIRS),
        FIELD(struct exec_args, "cwd", cwd, PATH),
        FIELD(struct exec_args, "user", user, NAME),
        FIELD(struct exec_args, "groups", groups, NUMBERS),
        FIELD(struct exec_args, "stdin", want_stdin, FLAG),
        FIELD(struct exec_args, "input", input, DATA),
        FIELD(struct exec_args, "pty", pty_raw, RAW),
        FIELD(struct exec_args, "timeout_s", timeout_s, SECONDS),
        FIELD(struct exec_args, "background", background, FLAG),
        FIELD(struct exec_args, "stream", stream, FLAG),
        FIELD(struct exec_args, "output_limit_bytes", output_limit, NUMBER),
    };
    memset(out, 0, sizeof *out);
    const char *problem = fields_parse(raw, fields, COUNT(fields), NULL, out);
    if (problem)
        return problem;
    if (!out->cid.p || !out->cid.n)
        return "field \"cid\" is missing";
    if (!out->argv.p == !out->shell.p)
        return "exactly one of \"argv\" and \"shell\" must be given";
    struct mp_reader argv = mp_reader_of(out->argv.p, out->argv.n);
    if (out->argv.p && mp_get_array(&argv) == 0)
        return "field \"argv\" is empty";
    if (out->interpreter.p && (!out->shell.p || out->session.p || !out->interpreter.n))
        return "field \"interpreter\" goes with \"shell\", outside of a session";
    if (out->input.n > INLINE_BYTES)
        return "field \"input\" is larger than 65536 bytes: use \"stdin\"";
    if (out->pty_raw.p && (problem = parse_pty(out)))
        return problem;
    if (!out->session.p)
        return NULL;
    if (!out->shell.p)
        return "a session runs \"shell\" text, not \"argv\"";
    if (out->cwd.p || out->user.p || out->groups.p || out->pty || out->want_stdin ||
        out->input.p || (out->env.p && out->env.n > 1))
        return "cwd, env, user, groups, stdin, input and pty belong to the session, not to its command";
    return NULL;
}

const char *args_session(struct mp_bytes raw, struct session_args *out)
{
    static const struct field fields[] = {
        FIELD(struct session_args, "name", name, NAME),
        FIELD(struct session_args, "env", env, PAIRS),
        FIELD(struct session_args, "cwd", cwd, PATH),
        FIELD(struct session_args, "user", user, NAME),
        FIELD(struct session_args, "shell", shell, NAME),
    };
    memset(out, 0, sizeof *out);
    const char *problem = fields_parse(raw, fields, COUNT(fields), NULL, out);
    if (problem)
        return problem;
    return out->name.p && out->name.n ? NULL : "field \"name\" is missing";
}

const char *args_command(struct mp_bytes raw, const char *allowed, struct command_args *out)
{
    static const struct field fields[] = {
        FIELD(struct command_args, "cid", cid, NAME),
        FIELD(struct command_args, "data", data, DATA),
        FIELD(struct command_args, "eof", eof, FLAG),
        FIELD(struct command_args, "signal", signal, NUMBER),
        FIELD(struct command_args, "rows", rows, NUMBER),
        FIELD(struct command_args, "cols", cols, NUMBER),
        FIELD(struct command_args, "stdout_offset", stdout_offset, NUMBER),
        FIELD(struct command_args, "stderr_offset", stderr_offset, NUMBER),
    };
    memset(out, 0, sizeof *out);
    const char *problem = fields_parse(raw, fields, COUNT(fields), allowed, out);
    if (problem)
        return problem;
    return out->cid.p && out->cid.n ? NULL : "field \"cid\" is missing";
}

const char *args_path(struct mp_bytes raw, const char *allowed, struct path_args *out)
{
    static const struct field fields[] = {
        FIELD(struct path_args, "path", path, PATH),
        FIELD(struct path_args, "target", target, PATH),
        FIELD(struct path_args, "user", user, NAME),
        FIELD(struct path_args, "data", data, DATA),
        FIELD(struct path_args, "owner", owner, NAME),
        FIELD(struct path_args, "mode", mode, NUMBER),
        FIELD(struct path_args, "offset", offset, NUMBER),
        FIELD(struct path_args, "length", length, NUMBER),
        FIELD(struct path_args, "follow", follow_given, FLAG),
        FIELD(struct path_args, "recursive", recursive, FLAG),
        FIELD(struct path_args, "append", append, FLAG),
    };
    memset(out, 0, sizeof *out);
    out->follow_given = true;
    const char *problem = fields_parse(raw, fields, COUNT(fields), allowed, out);
    if (problem)
        return problem;
    out->nofollow = !out->follow_given;
    if (!out->path.p || !out->path.n)
        return "field \"path\" is missing or empty";
    if (out->mode.set && out->mode.value > 07777)
        return "field \"mode\" is out of range";
    if (out->offset.value > INT64_MAX || out->length.value > INT64_MAX)
        return "field \"offset\" or \"length\" is out of range";
    return NULL;
}

const char *args_port(struct mp_bytes raw, uint16_t *port)
{
    struct command_args parsed = { 0 };
    static const struct field fields[] = {
        FIELD(struct command_args, "port", rows, NUMBER),
    };
    const char *problem = fields_parse(raw, fields, COUNT(fields), NULL, &parsed);
    if (problem)
        return problem;
    if (!parsed.rows.set || parsed.rows.value == 0 || parsed.rows.value > 65535)
        return "field \"port\" is missing or out of range";
    *port = (uint16_t)parsed.rows.value;
    return NULL;
}

const char *args_fncall(struct mp_bytes raw, struct fncall_args *out)
{
    static const struct field fields[] = {
        FIELD(struct fncall_args, "argv", argv, TEXTS),
        FIELD(struct fncall_args, "env", env, PAIRS),
        FIELD(struct fncall_args, "filter", filter, DATA),
        FIELD(struct fncall_args, "files_bytes", files_bytes, NUMBER),
        FIELD(struct fncall_args, "network", network, FLAG),
    };
    memset(out, 0, sizeof *out);
    const char *problem = fields_parse(raw, fields, COUNT(fields), NULL, out);
    if (problem)
        return problem;
    struct mp_reader argv = mp_reader_of(out->argv.p, out->argv.n);
    if (!out->argv.p || mp_get_array(&argv) == 0)
        return "field \"argv\" is missing or empty";
    return out->filter.n % 8 || out->filter.n > 4096 * 8 ? "field \"filter\" is malformed" : NULL;
}

const char *args_ping(struct mp_bytes raw, bool *first)
{
    static const struct field fields[] = { { "first", FLAG, 0, "field \"first\" is malformed" } };
    struct mp_reader r = mp_reader_of(raw.p, raw.n);
    *first = false;
    if (mp_take_nil(&r))
        return mp_finished(&r) ? NULL : "the arguments are not one map";
    return fields_parse(raw, fields, COUNT(fields), NULL, first);
}

const char *args_nothing(struct mp_bytes raw)
{
    struct mp_reader r = mp_reader_of(raw.p, raw.n);
    if (mp_take_nil(&r))
        return mp_finished(&r) ? NULL : "the arguments are not one map";
    return fields_parse(raw, NULL, 0, NULL, NULL);
}
