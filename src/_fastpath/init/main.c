/* dsec-init: PID 1 of a sandbox and its agent (docs/protocol.md). */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "config.h"
#include "conn.h"
#include "process.h"
#include "serve.h"

static int die(const char *what)
{
    dprintf(2, "dsec-init: %s\n", what);
    return 64;
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--any-peer") != 0)
            return die("usage: dsec-init [--any-peer]  (descriptors: see docs/protocol.md)");
        config.any_peer = true;
    }
    /* First, so that what children inherit is mapped side by side below it, as one piece. */
    const char *problem = tables_open() ? config_read(FD_CONFIG) : "no memory for the tables";
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
