/* Sessions: a shell that stays, fed one command at a time over a private descriptor. */
#ifndef DSEC_SESSION_H
#define DSEC_SESSION_H

#include "job.h"

void session_open(struct call *call, const struct session_args *args);
void session_close(struct call *call, struct mp_bytes name);
void session_list(struct call *call);
/* Queue a command that `job_new` made; false: no such session, or no memory. */
bool session_submit(struct job *job, const struct exec_args *args, struct failure *failure);
/* Kill what `job` runs but keep the shell if it comes back in time. */
void session_interrupt(struct job *job);
void session_signal(struct job *job, int signal);
void session_forget(struct job *job);
const char *session_name(const struct job *job);
bool sessions_reap(pid_t pid, int status);
/* Kill and fail the session whose shell was stopped while it opened; true: the pid is a session's. */
bool sessions_stopped(pid_t pid);
bool session_table_open(void);
uint64_t sessions_tick(uint64_t now);
unsigned sessions_count(void);

#endif
