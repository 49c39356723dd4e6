/* Handlers of the operations on commands and sessions; each answers or keeps the call. */
#ifndef DSEC_EXEC_CALLS_H
#define DSEC_EXEC_CALLS_H

#include "conn.h"

void exec_run(struct call *call, struct mp_bytes args);
void exec_start(struct call *call, struct mp_bytes args);
void exec_attach(struct call *call, struct mp_bytes args);
void exec_wait(struct call *call, struct mp_bytes args);
void exec_stdin(struct call *call, struct mp_bytes args);
void exec_signal(struct call *call, struct mp_bytes args);
void exec_kill(struct call *call, struct mp_bytes args);
void exec_resize(struct call *call, struct mp_bytes args);
void exec_list(struct call *call, struct mp_bytes args);
void exec_forget(struct call *call, struct mp_bytes args);

#endif
