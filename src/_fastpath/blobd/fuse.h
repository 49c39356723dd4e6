/* The FUSE protocol as far as a read-only directory of blobs needs it (include/uapi/linux/fuse.h).
 *
 * Spoken directly: what matters here is that any process may go on with the connection of a dead one
 * (node ids come from blob ids, there are no file handles, nothing is negotiated anew), and that an
 * answer can be given by another thread than the one that took the request. All threads share one
 * descriptor: a clone of it would fail its requests when the process dies instead of keeping them.
 */
#ifndef DSEC_BLOBD_FUSE_H
#define DSEC_BLOBD_FUSE_H

#include <stdbool.h>
#include <stdint.h>

/* Serve `fd` on `threads` threads; the process ends when the directory is unmounted. */
bool fuse_start(int fd, uint32_t threads);
/* Ask for the requests again that a dead process had taken. 0 or negative errno (-EINVAL: the kernel
 * is older than 6.9). */
int fuse_resend(int fd);

void fuse_reply_error(uint64_t unique, int error);
/* Answer with bytes of `file`; an error of the file becomes EIO. */
void fuse_reply_file(uint64_t unique, int file, uint64_t offset, uint32_t size);

#endif
