/* Calls that move bytes: file operations in a child of ours, and TCP forwards.
 *
 * A file operation is a forked child that enters the sandbox as the user and works with blocking
 * calls. It speaks on three descriptors: a control socket for its result, a pipe for what it
 * produces (items, limited by the caller's credits) and a pipe for what the caller streams to it.
 */
#ifndef DSEC_TRANSFER_H
#define DSEC_TRANSFER_H

#include "args.h"
#include "conn.h"
#include "files.h"

void transfer_start(struct call *call, enum file_op op, const struct path_args *args);
void forward_start(struct call *call, uint16_t port);
bool transfers_reap(pid_t pid);

#endif
