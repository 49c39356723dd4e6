/* What runs in a forked child, before exec or instead of it.
 *
 * The child is the trusted code of dsec-init inside the sandbox's namespaces, with the rights of
 * the user it works for. Its memory stays unreadable from inside: init is not dumpable and that is
 * inherited until exec. It may block or be killed at any moment; init never waits for it.
 */
#ifndef DSEC_CHILD_H
#define DSEC_CHILD_H

#include <stdarg.h>
#include <sys/types.h>

#include "args.h"
#include "limits.h"

enum code {
    INVALID_ARGUMENT,
    NOT_FOUND,
    ALREADY_EXISTS,
    WRONG_STATE,
    PERMISSION_DENIED,
    UNSUPPORTED,
    EXHAUSTED,
    INTERNAL,
    CODES,
};

extern const char *const code_names[CODES];

/* Messages from the child on its control socket, one datagram each. */
enum report_kind {
    REPORT_FAILED = 1, /* struct report; the last one */
    REPORT_RESULT,     /* kind byte, then the encoded result; the last one */
    REPORT_BULK,       /* the result is what was written to the output pipe; the last one */
    REPORT_ITEM,       /* kind byte, then an encoded item */
    REPORT_READY,      /* a watch is in effect */
    REPORT_PTY,        /* the terminal's master travels beside */
};

struct report {
    uint8_t kind, code, disk_full, length;
    char message[224];
};

#define REPORT_MAX (INLINE_BYTES + 512)

struct child_fds {
    int in, out, err; /* -1: /dev/null */
    int ctl;
    int feed, status; /* of a session's shell, on 9 and 8 there; -1: none */
    bool shell;       /* the platform's shell stays open, on 4 */
};

#define CTL_FD 3
#define SHELL_FD 4
#define SHELL_FEED_FD 9
#define SHELL_STATUS_FD 8

struct identity {
    uid_t uid;
    gid_t gid;
    int n_groups;
    gid_t groups[64];
    char name[MAX_NAME], home[MAX_PATH / 4], shell[MAX_PATH / 4];
};

/* Fork into a cgroup (-1: our own); 0 in the child, -errno on failure. */
pid_t child_fork(int cgroup_fd);

/* --- from here on: called in the child only ----------------------------------------------- */

/* What a child enters the sandbox as. */
struct role {
    struct mp_bytes user;   /* p NULL: the configured one */
    struct mp_bytes groups; /* p NULL: the user's own */
    bool command;           /* of the sandbox's, so under its policy; else it acts for the caller */
    bool pty;               /* with a terminal of this size for 0..2 */
    uint16_t rows, cols;
};

/* Enter the sandbox: namespaces, limits, terminal, confinement, identity, descriptors 0..3 (and 8, 9). A
 * failure is reported and ends the child. */
void child_enter(const struct child_fds *fds, const struct role *role, struct identity *who);

/* Of a machine's own children: enter nothing, keep all rights. Descriptors: as above, then `first` and
 * `second`. */
void child_stay(const struct child_fds *fds, int first, int second);

_Noreturn void child_fail(enum code code, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* Report `err` (an errno value) about `path`; `what` reads like "cannot open". */
_Noreturn void child_fail_errno(int err, const char *what, struct mp_bytes path);
_Noreturn void child_result(const void *raw, size_t n);
bool child_send(enum report_kind kind, const void *data, size_t n, int fd);

_Noreturn void exec_child(const struct exec_args *args, const struct child_fds *fds);
/* Its second half, for who has entered the sandbox: directory, environment, exec. */
_Noreturn void exec_program(const struct exec_args *args, const struct identity *who, bool shell);
_Noreturn void shell_child(const struct session_args *args, const struct child_fds *fds);

/* confine_apparmor.c. Where config.apparmor is given: open what takes the profile's name, before the
 * namespaces are entered, and give the name as the last step before exec. The platform's shell is entered
 * unjudged and confined from its first instruction; any other program is executed by the profile. */
extern int apparmor_fd; /* -1: no profile */
void apparmor_open(bool platform_shell);
void apparmor_enter(bool platform_shell);

/* account.c: users and groups by the sandbox's own /etc/passwd and /etc/group. */
bool account_find(struct mp_bytes user, struct identity *who);
bool account_group(struct mp_bytes group, gid_t *gid);
bool parse_number(const char *p, size_t n, uint32_t *out);

#endif
