/* Core-scheduling cookies (Documentation/admin-guide/hw-vuln/core-scheduling.rst). */
#ifndef DSEC_NATIVE_SCHED_H
#define DSEC_NATIVE_SCHED_H

#include <stdint.h>
#include <sys/types.h>

enum cookie_scope { COOKIE_THREAD, COOKIE_PROCESS, COOKIE_PROCESS_GROUP };

/* A fresh cookie for `pid`. -EINVAL where the kernel was built without core scheduling, -ENODEV
 * where the processor has no SMT. */
int create_cookie(pid_t pid, enum cookie_scope scope);
/* Give `to` the cookie of `from`: a short-lived child carries it over. */
int share_cookie(pid_t from, pid_t to, enum cookie_scope scope);
int get_cookie(pid_t pid, uint64_t *cookie);

#endif
