/* What must survive the process (configure, add, pin, hold) is kept as the frame that asked for it, one
 * file each, and carried out again at the start. The files need not survive the machine.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "blobd/blob.h"
#include "blobd/control.h"
#include "blobd/log.h"

struct service service;

static bool restoring;

bool state_restoring(void)
{
    return restoring;
}

void state_save(struct call *call, const char *name, struct mp_bytes frame)
{
    char part[ID_SIZE + 16];

    if (call->code || restoring)
        return;
    snprintf(part, sizeof part, ".%s", name);
    int fd = openat(service.state, part, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    bool good = fd >= 0 && write(fd, frame.p, frame.n) == (ssize_t)frame.n;
    if (fd >= 0)
        close(fd);
    if (!good || renameat(service.state, part, service.state, name) < 0)
        call_fail(call, "internal", "cannot keep the request for a restart: %s", strerror(errno));
}

void state_forget(const char *name)
{
    unlinkat(service.state, name, 0);
}

static void restore_one(const char *name)
{
    static uint8_t frame[FRAME_MAX], out[FRAME_MAX];
    int fd = openat(service.state, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    ssize_t n = fd < 0 ? -1 : read(fd, frame, sizeof frame);

    if (fd >= 0)
        close(fd);
    if (n <= 0)
        return;
    struct call call = { .args = mp_reader_of(frame, (size_t)n), .fd = -1,
                         .out = mp_writer_of(out, sizeof out) };
    mp_get_array(&call.args);
    mp_get_u64(&call.args);
    struct mp_bytes operation = mp_get_str(&call.args);
    call_run(&call, operation, (struct mp_bytes){ frame, (size_t)n });
    if (call.code)
        log_line(LOG_ERROR, "cannot restore a registration", NULL, "%s: %s", name, call.message);
}

/* Every request whose file is an id and `ending`. */
static void restore_all(const char *ending)
{
    int fd = openat(service.state, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *list = fd < 0 ? NULL : fdopendir(fd);

    for (struct dirent *entry = list ? readdir(list) : NULL; entry; entry = readdir(list)) {
        size_t n = strnlen(entry->d_name, ID_SIZE - 1);
        if (blob_id_valid(entry->d_name, n) && strcmp(entry->d_name + n, ending) == 0)
            restore_one(entry->d_name);
    }
    if (list)
        closedir(list);
}

void state_restore(void)
{
    restoring = true;
    restore_one("configure");
    for (int i = 0; i < 3; i++) /* blobs before what speaks of them */
        restore_all((const char *[]){ "", ".pin", ".hold" }[i]);
    restoring = false;
}
