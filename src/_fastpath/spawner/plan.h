/* The plans of src/dsecd/host/plan.py, decoded. Everything points into the arena of the message. */
#ifndef DSEC_SPAWNER_PLAN_H
#define DSEC_SPAWNER_PLAN_H

#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "wire/msgpack.h"

#define MESSAGE_MAX (256u << 10) /* bytes of one message */
#define LOWERS_MAX 64
#define LIST_MAX 64 /* elements of any other list of a plan */
#define GUARDS_MAX 256
#define FDS_GIVEN 2 /* of a creation, user and network namespace; then the lowers */
#define FDS_MAX (FDS_GIVEN + LOWERS_MAX)

struct file_write {
    const char *path, *value;
};

struct bind {
    const char *source, *target;
    bool read_only;
};

struct new_file {
    const char *target; /* inside the root, without a leading slash */
    struct mp_bytes content;
    uint32_t mode;
};

/* Nothing of it: the path is held in place, no more. */
enum { GUARD_READ_ONLY = 1, GUARD_NO_EXEC = 2, GUARD_MASK = 4 };

struct guard {
    const char *path; /* inside, absolute; those above it come before it */
    uint32_t how;
};

/* Of a creation; a re-rooting uses the part of it that describes the root. */
struct container_plan {
    const char *sandbox, *cgroup, *runtime_dir, *spool_dir, *upper_dir, *dev_tree, *hostname;
    const char *fail_step;
    uint32_t lowers, raw_lowers, uid_base, owner_uid, upper_project;
    uint64_t upper_bytes;
    struct file_write writes[LIST_MAX];
    struct bind binds[LIST_MAX];
    struct new_file files[LIST_MAX];
    struct guard guards[GUARDS_MAX];
    const char *read_only[LIST_MAX], *masked[LIST_MAX];
    uint32_t write_count, bind_count, file_count, read_only_count, masked_count, cpu_count;
    uint32_t guard_count;
    cpu_set_t cpus;
    struct mp_bytes init_config;
    bool linked; /* files of several names may be in the topmost lower, an upper of a checkpoint */
    bool trace;
};

struct destroy_plan {
    const char *sandbox, *cgroup, *runtime_dir, *upper_dir;
    uint32_t timeout_ms;
    bool netns; /* the last descriptor is its network namespace: say whether it is reusable */
};

struct stage_plan {
    const char *procs[LIST_MAX];
    uint32_t count;
};

/* Room for the NUL-terminated copies of a message's strings. */
struct arena {
    char *p, *end;
    char bytes[MESSAGE_MAX + 4096];
};

/* Each returns 0, or -EBADMSG for a plan that is malformed, too long or has an unknown field. */
int read_container_plan(struct mp_reader *reader, struct arena *arena, struct container_plan *plan);
int read_reroot_plan(struct mp_reader *reader, struct arena *arena, struct container_plan *plan);
int read_destroy_plan(struct mp_reader *reader, struct arena *arena, struct destroy_plan *plan);
int read_stage_plan(struct mp_reader *reader, struct arena *arena, struct stage_plan *plan);

#endif
