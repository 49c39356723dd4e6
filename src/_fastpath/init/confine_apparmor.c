/* A command enters its sandbox's AppArmor profile.
 *
 * At once, and not "on exec": the program that the caller named is then executed by the rules of the
 * profile like any other. The platform's shell has no path that rules could be about, so that one is
 * entered on exec. no_new_privs does not matter to a process that was not confined before.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "child.h"
#include "config.h"

int apparmor_fd = -1;

void apparmor_open(bool platform_shell)
{
    if (!config.apparmor.n)
        return;
    /* Our own /proc: over the one inside, root inside may have mounted something else. */
    apparmor_fd = open(platform_shell ? "/proc/thread-self/attr/apparmor/exec"
                                      : "/proc/thread-self/attr/apparmor/current",
                       O_WRONLY | O_CLOEXEC);
    if (apparmor_fd < 0)
        child_fail(UNSUPPORTED, "cannot reach AppArmor: %s", strerror(errno));
}

void apparmor_enter(bool platform_shell)
{
    char order[MAX_NAME + 32];
    struct mp_bytes name = config.apparmor;
    if (apparmor_fd < 0)
        return;
    int n = snprintf(order, sizeof order, "%s %.*s", platform_shell ? "exec" : "changeprofile",
                     (int)name.n, name.p);
    if (write(apparmor_fd, order, (size_t)n) != n)
        child_fail(INTERNAL, "cannot enter the AppArmor profile %.*s: %s", (int)name.n, name.p,
                   strerror(errno));
}
