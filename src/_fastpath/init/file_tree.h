/* Walks over directory trees, never through symbolic links. Children only. */
#ifndef DSEC_FILE_TREE_H
#define DSEC_FILE_TREE_H

#include "files.h"

struct tree_change {
    bool chown;
    mode_t mode;
    uid_t uid;
    gid_t gid;
};

/* Empty directory `name` of any depth; 0, or -1 and errno. */
int tree_remove(int parent, const char *name);
int tree_change(int parent, const char *name, const struct tree_change *change, bool recursive);
_Noreturn void file_list(const struct path_args *args);

/* A list under construction, sent as the result of the child. */
struct listing {
    struct mp_writer w;
    uint8_t *room;
    uint32_t count;
};

void listing_open(struct listing *list);
_Noreturn void listing_send(struct listing *list);

#endif
