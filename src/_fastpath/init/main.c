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
    bool vm = false;
    for (int i = 1; i < argc; i++) {
        vm |= strcmp(argv[i], "--vm") == 0;
        config.any_peer |= strcmp(argv[i], "--any-peer") == 0;
        if (strcmp(argv[i], "--vm") != 0 && strcmp(argv[i], "--any-peer") != 0)
            return die("usage: dsec-init [--any-peer | --vm]  (descriptors: see docs/protocol.md)");
    }
    if (vm && getpid() != 1)
        return die("--vm is for PID 1 of a virtual machine: it mounts over /dev, /proc and /sys");
    /* First, so that what children inherit is mapped side by side below it, as one piece. */
    const char *problem = tables_open() ? NULL : "no memory for the tables";
    if (!problem)
        problem = vm ? vm_open() : config_read(FD_CONFIG);
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
