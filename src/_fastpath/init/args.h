/* Arguments of calls: the structs of libdsec/model.py, read in place from the request's frame. */
#ifndef DSEC_ARGS_H
#define DSEC_ARGS_H

#include "../wire/msgpack.h"

struct opt_u64 {
    bool set;
    uint64_t value;
};

struct opt_f64 {
    bool set;
    double value;
};

/* A bytes field whose `p` is NULL was left out (or nil). */
struct exec_args {
    struct mp_bytes cid, shell, interpreter, session, cwd, user, input;
    struct mp_bytes argv, env, groups, pty_raw; /* still encoded */
    struct opt_u64 output_limit;
    struct opt_f64 timeout_s;
    bool want_stdin, background, stream, pty;
    uint16_t rows, cols;
};

struct path_args {
    struct mp_bytes path, target, user, data, owner;
    struct opt_u64 mode, offset, length;
    bool nofollow, recursive, append, follow_given;
};

struct session_args {
    struct mp_bytes name, cwd, user, shell, env;
};

struct command_args {
    struct mp_bytes cid, data;
    struct opt_u64 stdout_offset, stderr_offset, signal, rows, cols;
    bool eof;
};

struct fncall_args {
    struct mp_bytes filter; /* struct sock_filter[] for calls; n 0: none */
    struct mp_bytes argv, env; /* still encoded */
    struct opt_u64 files_bytes;
    bool network;
};

/* Each returns NULL, or a static text that says which field is wrong. */
const char *args_exec(struct mp_bytes raw, struct exec_args *out);
const char *args_session(struct mp_bytes raw, struct session_args *out);
const char *args_command(struct mp_bytes raw, const char *fields, struct command_args *out);
/* `fields`: space separated names that the operation takes besides `path`. */
const char *args_path(struct mp_bytes raw, const char *fields, struct path_args *out);
const char *args_port(struct mp_bytes raw, uint16_t *port);
const char *args_fncall(struct mp_bytes raw, struct fncall_args *out);
const char *args_ping(struct mp_bytes raw, bool *first);
const char *args_nothing(struct mp_bytes raw);

#endif
