#include "serve.h"

#include "cgroup.h"
#include "conn.h"
#include "job.h"
#include "leaver.h"
#include "root.h"
#include "session.h"
#include "transfer.h"

static uint64_t due; /* the next deadline, 0: none */

static uint64_t sooner(uint64_t a, uint64_t b)
{
    return !a ? b : !b || a < b ? a : b;
}

const char *serve_open(void)
{
    if (loop_open() < 0)
        return "epoll failed";
    /* The scratch first: it wants whole pages. */
    bool made = scratch_open() && conn_table_open() && cgroup_table_open() &&
                call_table_open() && job_table_open() && drain_table_open() &&
                session_table_open() && transfer_table_open() && leaver_table_open();
    return made ? NULL : "no memory for the tables";
}

void serve_round(int limit_ms)
{
    int timeout = limit_ms;
    if (due) {
        uint64_t now = now_us();
        uint64_t wait = due > now ? (due - now + 999) / 1000 : 0;
        if (limit_ms < 0 || wait < (uint64_t)limit_ms)
            timeout = wait > 3600000 ? 3600000 : (int)wait;
    }
    loop_round(timeout);
    uint64_t now = now_us();
    due = jobs_tick(now); /* first: a command's timeout may set a session's deadline */
    due = sooner(due, sessions_tick(now));
    due = sooner(due, conns_tick(now));
    due = sooner(due, root_tick(now));
    due = sooner(due, leavers_tick(now)); /* last: a connection that ends makes some */
    scratch_trim();
}
