/* File operations as they run in their child. */
#ifndef DSEC_FILES_H
#define DSEC_FILES_H

#include <sys/stat.h>

#include "child.h"

enum file_op {
    FILE_STAT, FILE_LIST, FILE_GLOB, FILE_MKDIR, FILE_RENAME, FILE_REMOVE, FILE_CHMOD, FILE_CHOWN,
    FILE_READ, FILE_WRITE, FILE_DOWNLOAD, FILE_UPLOAD, FILE_WATCH,
    FILE_PACK, /* vm_pack.c: a virtual machine's own */
};

struct file_task {
    enum file_op op;
    const struct path_args *args;
    struct child_fds fds;
};

_Noreturn void file_child(const struct file_task *task);

/* --- for the operations' own files --------------------------------------------------------- */

#define IN_FD 0  /* what the caller streams */
#define OUT_FD 1 /* what the caller gets */
/* Of files that are renamed over their target once complete; a watch does not show them. */
#define TEMPORARY_PREFIX ".dsec-write-"

/* The sandbox's root and the directory that relative paths start at. */
extern int root_fd;

/* Absolute form of a caller's path, ended by NUL; fails the child when it is too long. */
const char *absolute_path(struct mp_bytes path);
/* openat2 inside the root; -1 and errno. */
int open_in_root(const char *path, int flags, mode_t mode);
/* Open the directory of `path` and point `name` at its last component ("." for the root). */
int open_parent(struct mp_bytes path, const char **name, bool make, mode_t mode);
struct mp_bytes text_bytes(const char *text);

bool write_all(int fd, const void *data, size_t n);
/* 1: `n` bytes read; 0: end before any; -1: error or end in the middle. */
int read_all(int fd, void *data, size_t n);
/* Did the caller end its stream on purpose? false: it went away. */
bool stream_was_committed(void);

void put_stat(struct mp_writer *w, struct mp_bytes name, int dir, const char *entry,
              const struct stat *st);
_Noreturn void transferred(uint64_t size);

_Noreturn void file_read(const struct path_args *args);
_Noreturn void file_write(const struct path_args *args);
_Noreturn void file_glob(const struct path_args *args);
_Noreturn void file_watch(const struct path_args *args);
_Noreturn void tar_download(const struct path_args *args);
_Noreturn void tar_upload(const struct path_args *args);
_Noreturn void vm_pack_child(const struct child_fds *fds);

#endif
