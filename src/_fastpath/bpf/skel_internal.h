/* What a generated light skeleton calls, for a program of user space.
 *
 * The skeleton carries the object as data and as the instructions of a loader, a BPF program of
 * type syscall that makes the maps and loads the programs. So nothing of libbpf is needed at run
 * time; its header of this name is not needed to build either.
 */
#ifndef DSEC_BPF_SKEL_INTERNAL_H
#define DSEC_BPF_SKEL_INTERNAL_H

#include <errno.h>
#include <linux/bpf.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The loader program's context; its layout is fixed by the generator. */
struct bpf_map_desc {
    int map_fd;
    __u32 max_entries; /* not 0: instead of the object's */
    __aligned_u64 initial_value;
};

struct bpf_prog_desc {
    int prog_fd;
};

struct bpf_loader_ctx {
    __u32 sz;
    __u32 flags;
    __u32 log_level;
    __u32 log_size;
    __u64 log_buf;
};

struct bpf_load_and_run_opts {
    struct bpf_loader_ctx *ctx;
    const void *data;
    const void *insns;
    __u32 data_sz;
    __u32 insns_sz;
    const char *errstr; /* the step that failed */
};

static inline int skel_bpf(int command, union bpf_attr *attr, size_t size)
{
    return (int)syscall(SYS_bpf, command, attr, size);
}

static inline void *skel_alloc(size_t size)
{
    return calloc(1, size);
}

static inline void skel_free(void *skeleton)
{
    free(skeleton);
}

static inline int skel_closenz(int fd)
{
    return fd > 0 ? close(fd) : -EINVAL;
}

static inline void *skel_prep_map_data(const void *value, size_t mapped, size_t size)
{
    void *copy = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return copy == MAP_FAILED ? NULL : memcpy(copy, value, size);
}

/* Show the map's own value in the place of the copy that was its initial one. */
static inline void *skel_finalize_map_data(__u64 *initial, size_t mapped, int protection, int fd)
{
    void *place = (void *)(uintptr_t)*initial;
    void *value = mmap(place, mapped, protection, MAP_SHARED | MAP_FIXED, fd, 0);
    return value == MAP_FAILED ? NULL : value;
}

static inline void skel_free_map_data(void *value, __u64 initial, size_t mapped)
{
    (void)initial;
    if (value)
        munmap(value, mapped);
}

static inline int skel_make_data(const struct bpf_load_and_run_opts *opts)
{
    __u32 key = 0;
    union bpf_attr attr = { .map_type = BPF_MAP_TYPE_ARRAY, .key_size = sizeof key,
                            .value_size = opts->data_sz, .max_entries = 1,
                            .map_name = "dsec_loader" };
    int map = skel_bpf(BPF_MAP_CREATE, &attr, sizeof attr);
    if (map < 0)
        return -errno;
    attr = (union bpf_attr){ .map_fd = (__u32)map };
    attr.key = (uintptr_t)&key;
    attr.value = (uintptr_t)opts->data;
    if (skel_bpf(BPF_MAP_UPDATE_ELEM, &attr, sizeof attr) < 0) {
        int error = -errno;
        close(map);
        return error;
    }
    return map;
}

static inline int skel_load_loader(const struct bpf_load_and_run_opts *opts, int map)
{
    union bpf_attr attr = { .prog_type = BPF_PROG_TYPE_SYSCALL,
                            .insn_cnt = opts->insns_sz / sizeof(struct bpf_insn),
                            .prog_flags = BPF_F_SLEEPABLE, .prog_name = "dsec_loader",
                            .log_level = opts->ctx->log_level, .log_size = opts->ctx->log_size,
                            .log_buf = opts->ctx->log_buf };
    attr.insns = (uintptr_t)opts->insns;
    attr.license = (uintptr_t) "Dual BSD/GPL";
    attr.fd_array = (uintptr_t)&map;
    int program = skel_bpf(BPF_PROG_LOAD, &attr, sizeof attr);
    return program < 0 ? -errno : program;
}

static inline int skel_run_loader(const struct bpf_load_and_run_opts *opts, int program)
{
    union bpf_attr attr = { .test = { .prog_fd = (__u32)program,
                                      .ctx_in = (uintptr_t)opts->ctx,
                                      .ctx_size_in = opts->ctx->sz } };
    if (skel_bpf(BPF_PROG_TEST_RUN, &attr, sizeof attr) < 0)
        return -errno;
    return (int)attr.test.retval < 0 ? (int)attr.test.retval : 0;
}

static inline int bpf_load_and_run(struct bpf_load_and_run_opts *opts)
{
    opts->errstr = "make the loader's map";
    int map = skel_make_data(opts);
    if (map < 0)
        return map;
    opts->errstr = "load the loader";
    int program = skel_load_loader(opts, map);
    int result = program;
    if (program >= 0) {
        opts->errstr = "run the loader";
        result = skel_run_loader(opts, program);
        close(program);
    }
    close(map);
    return result;
}

#endif
