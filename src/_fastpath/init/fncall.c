/* fncall.serve: from the request to a keeper that serves (fncall.h). */
#include "fncall.h"

#include <errno.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "args.h"

static _Noreturn void keep(const struct fncall_args *args, int channel)
{
    struct child_fds fds = { .in = -1, .out = -1, .err = -1, .ctl = channel, .feed = -1, .status = -1 };
    struct identity who;
    struct keeper keeper;
    struct role role = { .user = { (const uint8_t *)"root", 4 } };
    child_enter(&fds, &role, &who);
    prctl(PR_SET_NAME, "dsec-fncall", 0, 0, 0);
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0); /* the change of identity may have set it */
    keeper_open(&keeper, args, &who);
    fncall_loop(&keeper);
}

void fncall_serve(struct call *call, struct mp_bytes raw)
{
    struct fncall_args args;
    int channel;
    const char *problem = args_fncall(raw, &args);
    if (problem) {
        call_fail(call, "invalid_argument", "%s", problem);
        return;
    }
    if (!conn_take_fds(call->conn, &channel, 1)) {
        call_fail(call, "invalid_argument", "one descriptor must come with the call");
        return;
    }
    pid_t pid = fork(); /* with init's own OOM score: only calls are to be preferred by the OOM killer */
    if (pid == 0)
        keep(&args, channel);
    int err = errno;
    close(channel);
    if (pid < 0)
        call_fail(call, "exhausted", "the sandbox cannot start another process: %s", strerror(err));
    else
        reply_nil(call); /* its end is seen on the channel */
}
