/* What session.c (running) and session_open.c (opening, closing) share. */
#ifndef DSEC_SESSION_STATE_H
#define DSEC_SESSION_STATE_H

#include "session.h"

struct outlet {
    struct source in;
    struct session *session;
    int index;
};

struct session {
    bool used, ready, interrupted;
    char name[MAX_NAME];
    pid_t pid;
    int cgroup;
    struct source ctl, feed, status;
    struct outlet out[2];
    struct job *current, *queue;
    struct call *opening, *closing;
    uint8_t *line; /* the encoded command on its way to the shell */
    size_t line_cap, line_n, line_at;
    char digits[8];
    size_t digits_n;
    uint64_t grace_us, rekill_us;
};

/* The table, and the end of the part of it that was ever used. */
extern struct session *sessions, *sessions_end;

struct session *session_find(struct mp_bytes name);
void session_kill(struct session *s); /* every process it started, and the shell */
void session_free(struct session *s);
void session_outlet_ready(struct source *source, uint32_t events);
void session_feed_ready(struct source *source, uint32_t events);
void session_status_ready(struct source *source, uint32_t events);
void session_ctl_ready(struct source *source, uint32_t events);

#endif
