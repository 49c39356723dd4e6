/* dsec-init: PID 1 of a sandbox, a container or a virtual machine, and its agent (docs/protocol.md). */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "config.h"
#include "conn.h"
#include "process.h"
#include "serve.h"
#include "vm.h"

static int die(const char *what)
{
    dprintf(2, "dsec-init: %s\n", what);
    return 64;
}

int main(int argc, char **argv)
{
    bool vm = false, service = false;
    for (int i = 1; i < argc; i++) {
        bool known = strcmp(argv[i], "--any-peer") == 0;
        config.any_peer |= known;
        vm |= strcmp(argv[i], "--vm") == 0;
        service |= strcmp(argv[i], "--service") == 0;
        if (!known && strcmp(argv[i], "--vm") != 0 && strcmp(argv[i], "--service") != 0)
            return die("usage: dsec-init [--any-peer | --vm | --service]  (see docs/protocol.md)");
    }
    if (vm && getpid() != 1)
        return die("--vm is for PID 1 of a virtual machine: it mounts over /dev, /proc and /sys");
    /* First, so that what children inherit is mapped side by side below it, as one piece. */
    const char *problem = tables_open() ? NULL : "no memory for the tables";
    if (!problem)
        problem = vm || service ? vm_open(service) : config_read(FD_CONFIG);
    if (!problem)
        problem = serve_open();
    if (!problem)
        problem = process_open();
    if (!problem && !conns_open(FD_LISTEN))
        problem = "descriptor 3 is not a socket to answer on";
    if (problem)
        return die(problem);
    for (;;)
        serve_round(-1);
}
