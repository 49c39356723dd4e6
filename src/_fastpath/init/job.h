/* Commands: what runs, what it wrote, how it ended, and who waits for it. */
#ifndef DSEC_JOB_H
#define DSEC_JOB_H

#include <sys/types.h>

#include "args.h"
#include "child.h"
#include "conn.h"

struct session;

enum job_state {
    JOB_FREE,
    JOB_QUEUED,   /* waits for its turn in a session */
    JOB_STARTING, /* forked, not yet exec'd */
    JOB_RUNNING,
    JOB_ENDED,
};

/* One output of a command: bytes [0, kept) are stored, first in memory, then in a spool file. */
struct stream {
    struct source in; /* the pipe or terminal; open until every holder closed the other end */
    struct job *job;
    uint8_t *memory; /* STREAM_MEMORY bytes, or NULL */
    int file;
    uint64_t total, kept;
    bool full; /* storing ended: a limit or the disk */
};

struct job {
    enum job_state state;
    char cid[MAX_NAME];
    char command[256];
    size_t command_n;
    pid_t pid;
    int cgroup, status;
    struct source ctl, in;
    struct stream out[2];
    struct call *calls;       /* followers, starters, waiters */
    struct call *stdin_calls; /* whose data is not yet in the pipe, in order */
    uint8_t *input;           /* `input` of the call that did not fit in the pipe */
    size_t input_n, input_at;
    struct session *session;
    struct job *session_next;
    uint8_t *text; /* of a session command, while queued */
    size_t text_n;
    uint64_t limit; /* bytes kept of both outputs */
    uint64_t started_us, ended_us, deadline_us, timeout_us;
    double started_at;
    bool pty, background, want_stdin, feeding_eof;
    bool timed_out, disk_full, session_ended, killed;
    bool answered; /* a foreground command whose whole result was sent */
    uint8_t stdin_last;
};

struct job *job_find(struct mp_bytes cid);
/* A new job, after forgetting old ones if need be; NULL when all slots are in use. */
struct job *job_new(const struct exec_args *args);
void job_free(struct job *job);
void job_attach(struct job *job, struct call *call);
void job_detach(struct call *call);
void job_pump(struct job *job);
void job_fail(struct job *job, const struct failure *failure); /* ends its calls and forgets it */
void job_started(struct job *job);
void job_ended(struct job *job, int status);
void job_kill(struct job *job);
bool job_launch(struct job *job, const struct exec_args *args, struct failure *failure);
bool jobs_reap(pid_t pid, int status);
/* Kill and fail the command that was stopped before its exec; true: the pid is a command's. */
bool jobs_stopped(pid_t pid);
bool job_table_open(void);
uint64_t jobs_tick(uint64_t now);
void jobs_trim(void);
struct job *jobs_next(struct job *after); /* iterate; NULL starts and ends */
unsigned jobs_running(void);

/* spool.c */
void stream_open(struct stream *stream, struct job *job);
bool stream_listen(struct stream *stream, int fd);
void stream_store(struct stream *stream, const uint8_t *data, size_t n);
size_t stream_read(const struct stream *stream, uint64_t offset, uint8_t *to, size_t n);
/* Take what is in the pipe now; a writer that goes on cannot hold us. */
void stream_drain(struct stream *stream);
void stream_discard(struct stream *stream); /* drop what is stored */
void stream_free(struct stream *stream);    /* and go on draining the pipe for its holders */
/* The reader of a forgotten command's pipe. Of more than MAX_DRAINS the oldest is closed: whoever
 * still writes to that one dies of SIGPIPE. */
void drain_adopt(int fd);
bool drain_table_open(void);
uint64_t spool_bytes(void);

/* stdin.c */
void stdin_write(struct call *call, struct mp_bytes data, bool eof);
void stdin_forget(struct call *call);
void stdin_close(struct job *job);
bool stdin_open(struct job *job, int fd, struct mp_bytes input);

/* follow.c: calls that wait for a command */
extern const struct call_ops run_ops, attach_ops, start_ops, wait_ops;
void put_command_info(struct mp_writer *w, const struct job *job);

bool pipe_make(int *ours, int *theirs, bool we_read);

/* One datagram of a child. `report` has REPORT_MAX bytes. Length, 0 at the end, -1: none now. */
ssize_t ctl_receive(int fd, uint8_t *report, int *passed_fd);
void failure_of_report(const uint8_t *report, size_t n, struct failure *failure);

#endif
