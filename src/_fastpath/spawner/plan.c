#include "spawner/plan.h"

#include <errno.h>
#include <string.h>

/* A copy of the next string. A NUL inside would cut a path short: such a plan is malformed. */
static const char *text(struct mp_reader *reader, struct arena *arena)
{
    struct mp_bytes bytes = mp_get_bytes(reader);
    if (reader->failed || memchr(bytes.p, 0, bytes.n) || bytes.n >= (size_t)(arena->end - arena->p)) {
        reader->failed = true;
        return "";
    }
    char *copy = arena->p;
    memcpy(copy, bytes.p, bytes.n);
    copy[bytes.n] = 0;
    arena->p += bytes.n + 1;
    return copy;
}

static uint32_t number(struct mp_reader *reader)
{
    uint64_t value = mp_get_u64(reader);
    if (value > UINT32_MAX)
        reader->failed = true;
    return (uint32_t)value;
}

static uint32_t list(struct mp_reader *reader, uint32_t most)
{
    uint32_t count = mp_get_array(reader);
    if (count > most) {
        reader->failed = true;
        return 0;
    }
    return reader->failed ? 0 : count;
}

static void tuple(struct mp_reader *reader, uint32_t size)
{
    if (mp_get_array(reader) != size)
        reader->failed = true;
}

static uint32_t texts(struct mp_reader *reader, struct arena *arena, const char **out)
{
    uint32_t count = list(reader, LIST_MAX);
    for (uint32_t i = 0; i < count; i++)
        out[i] = text(reader, arena);
    return count;
}

static void read_writes(struct mp_reader *reader, struct arena *arena, struct container_plan *plan)
{
    plan->write_count = list(reader, LIST_MAX);
    for (uint32_t i = 0; i < plan->write_count; i++) {
        tuple(reader, 2);
        plan->writes[i].path = text(reader, arena);
        plan->writes[i].value = text(reader, arena);
    }
}

static void read_binds(struct mp_reader *reader, struct arena *arena, struct container_plan *plan)
{
    plan->bind_count = list(reader, LIST_MAX);
    for (uint32_t i = 0; i < plan->bind_count; i++) {
        tuple(reader, 3);
        plan->binds[i].source = text(reader, arena);
        plan->binds[i].target = text(reader, arena);
        plan->binds[i].read_only = mp_get_bool(reader);
    }
}

static void read_files(struct mp_reader *reader, struct arena *arena, struct container_plan *plan)
{
    plan->file_count = list(reader, LIST_MAX);
    for (uint32_t i = 0; i < plan->file_count; i++) {
        tuple(reader, 3);
        plan->files[i].target = text(reader, arena);
        plan->files[i].content = mp_get_bytes(reader);
        plan->files[i].mode = number(reader);
    }
}

static void read_guards(struct mp_reader *reader, struct arena *arena, struct container_plan *plan)
{
    plan->guard_count = list(reader, GUARDS_MAX);
    for (uint32_t i = 0; i < plan->guard_count; i++) {
        tuple(reader, 2);
        plan->guards[i].path = text(reader, arena);
        plan->guards[i].how = number(reader);
        if (*plan->guards[i].path != '/')
            reader->failed = true;
    }
}

static void read_cpus(struct mp_reader *reader, struct container_plan *plan)
{
    plan->cpu_count = list(reader, CPU_SETSIZE);
    CPU_ZERO(&plan->cpus);
    for (uint32_t i = 0; i < plan->cpu_count; i++) {
        uint32_t cpu = number(reader);
        if (cpu >= CPU_SETSIZE)
            reader->failed = true;
        else
            CPU_SET(cpu, &plan->cpus);
    }
}

static void start(struct arena *arena)
{
    arena->p = arena->bytes;
    arena->end = arena->bytes + sizeof arena->bytes;
}

static int ended(const struct mp_reader *reader, bool complete)
{
    return complete && mp_finished(reader) ? 0 : -EBADMSG;
}

static void start_container_plan(struct arena *arena, struct container_plan *plan)
{
    *plan = (struct container_plan){
        .sandbox = "", .cgroup = "", .upper_dir = "", .dev_tree = "", .hostname = "",
        .fail_step = "",
    };
    start(arena);
}

static bool describes_root(const struct container_plan *plan)
{
    return plan->lowers > 0 && plan->lowers <= LOWERS_MAX && plan->raw_lowers <= plan->lowers &&
           plan->uid_base;
}

/* What a creation and a re-rooting share; false: another key. */
static bool read_root_key(struct mp_reader *reader, struct arena *arena,
                          struct container_plan *plan, struct mp_bytes key)
{
    if (mp_equal(key, "sandbox"))
        plan->sandbox = text(reader, arena);
    else if (mp_equal(key, "lowers"))
        plan->lowers = number(reader);
    else if (mp_equal(key, "raw_lowers"))
        plan->raw_lowers = number(reader);
    else if (mp_equal(key, "linked"))
        plan->linked = mp_get_bool(reader);
    else if (mp_equal(key, "uid_base"))
        plan->uid_base = number(reader);
    else if (mp_equal(key, "upper_dir"))
        plan->upper_dir = text(reader, arena);
    else if (mp_equal(key, "upper_bytes"))
        plan->upper_bytes = mp_get_u64(reader);
    else if (mp_equal(key, "upper_project"))
        plan->upper_project = number(reader);
    else if (mp_equal(key, "files"))
        read_files(reader, arena, plan);
    else if (mp_equal(key, "binds"))
        read_binds(reader, arena, plan);
    else if (mp_equal(key, "guards"))
        read_guards(reader, arena, plan);
    else if (mp_equal(key, "trace"))
        plan->trace = mp_get_bool(reader);
    else if (mp_equal(key, "fail_step"))
        plan->fail_step = text(reader, arena);
    else
        return false;
    return true;
}

int read_container_plan(struct mp_reader *reader, struct arena *arena, struct container_plan *plan)
{
    start_container_plan(arena, plan);
    for (uint32_t left = mp_get_map(reader); left && !reader->failed; left--) {
        struct mp_bytes key = mp_get_str(reader);
        if (read_root_key(reader, arena, plan, key))
            continue;
        if (mp_equal(key, "cgroup"))
            plan->cgroup = text(reader, arena);
        else if (mp_equal(key, "owner_uid"))
            plan->owner_uid = number(reader);
        else if (mp_equal(key, "writes"))
            read_writes(reader, arena, plan);
        else if (mp_equal(key, "runtime_dir"))
            plan->runtime_dir = text(reader, arena);
        else if (mp_equal(key, "spool_dir"))
            plan->spool_dir = text(reader, arena);
        else if (mp_equal(key, "dev_tree"))
            plan->dev_tree = text(reader, arena);
        else if (mp_equal(key, "read_only"))
            plan->read_only_count = texts(reader, arena, plan->read_only);
        else if (mp_equal(key, "masked"))
            plan->masked_count = texts(reader, arena, plan->masked);
        else if (mp_equal(key, "hostname"))
            plan->hostname = text(reader, arena);
        else if (mp_equal(key, "cpus"))
            read_cpus(reader, plan);
        else if (mp_equal(key, "init_config"))
            plan->init_config = mp_get_bytes(reader);
        else
            reader->failed = true;
    }
    return ended(reader, plan->runtime_dir && plan->spool_dir && describes_root(plan) &&
                             plan->owner_uid);
}

int read_reroot_plan(struct mp_reader *reader, struct arena *arena, struct container_plan *plan)
{
    start_container_plan(arena, plan);
    for (uint32_t left = mp_get_map(reader); left && !reader->failed; left--)
        if (!read_root_key(reader, arena, plan, mp_get_str(reader)))
            reader->failed = true;
    return ended(reader, describes_root(plan));
}

int read_destroy_plan(struct mp_reader *reader, struct arena *arena, struct destroy_plan *plan)
{
    *plan = (struct destroy_plan){ .sandbox = "", .cgroup = "", .upper_dir = "",
                                   .runtime_dir = "", .timeout_ms = 10000 };
    start(arena);
    for (uint32_t left = mp_get_map(reader); left && !reader->failed; left--) {
        struct mp_bytes key = mp_get_str(reader);
        if (mp_equal(key, "sandbox"))
            plan->sandbox = text(reader, arena);
        else if (mp_equal(key, "cgroup"))
            plan->cgroup = text(reader, arena);
        else if (mp_equal(key, "runtime_dir"))
            plan->runtime_dir = text(reader, arena);
        else if (mp_equal(key, "upper_dir"))
            plan->upper_dir = text(reader, arena);
        else if (mp_equal(key, "timeout_ms"))
            plan->timeout_ms = number(reader);
        else if (mp_equal(key, "netns"))
            plan->netns = mp_get_bool(reader);
        else
            reader->failed = true;
    }
    return ended(reader, true);
}

int read_stage_plan(struct mp_reader *reader, struct arena *arena, struct stage_plan *plan)
{
    start(arena);
    plan->count = texts(reader, arena, plan->procs);
    return ended(reader, true);
}
