#include "native/sched.h"

#include <sys/prctl.h>

#include "native/kernel.h"
#include "native/process.h"

#ifndef PR_SCHED_CORE
#define PR_SCHED_CORE 62
#define PR_SCHED_CORE_GET 0
#define PR_SCHED_CORE_CREATE 1
#define PR_SCHED_CORE_SHARE_TO 2
#define PR_SCHED_CORE_SHARE_FROM 3
#endif

int create_cookie(pid_t pid, enum cookie_scope scope)
{
    return (int)KERNEL(prctl(PR_SCHED_CORE, PR_SCHED_CORE_CREATE, pid, scope, 0));
}

struct sharing {
    pid_t from, to;
    enum cookie_scope scope;
    int error;
};

/* In a child of its own, so that the daemon's thread never carries a sandbox's cookie. */
static int carry_cookie(void *argument)
{
    struct sharing *work = argument;
    work->error = (int)KERNEL(
        prctl(PR_SCHED_CORE, PR_SCHED_CORE_SHARE_FROM, work->from, COOKIE_THREAD, 0));
    if (work->error == 0)
        work->error = (int)KERNEL(
            prctl(PR_SCHED_CORE, PR_SCHED_CORE_SHARE_TO, work->to, work->scope, 0));
    return 0;
}

int share_cookie(pid_t from, pid_t to, enum cookie_scope scope)
{
    struct sharing work = { .from = from, .to = to, .scope = scope };
    int status = run_in_child(CLONE_FILES, carry_cookie, &work);
    return status < 0 ? status : work.error;
}

int get_cookie(pid_t pid, uint64_t *cookie)
{
    return (int)KERNEL(
        prctl(PR_SCHED_CORE, PR_SCHED_CORE_GET, pid, COOKIE_THREAD, (unsigned long)cookie));
}
