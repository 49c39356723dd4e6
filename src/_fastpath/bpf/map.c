#include "bpf/map.h"

#include <errno.h>
#include <linux/bpf.h>
#include <sys/syscall.h>
#include <unistd.h>

static int call(enum bpf_cmd command, union bpf_attr *attr)
{
    return syscall(SYS_bpf, command, attr, sizeof *attr) < 0 ? -errno : 0;
}

int map_update(int map, const void *key, const void *value, uint64_t flags)
{
    union bpf_attr attr = {
        .map_fd = map,
        .key = (uintptr_t)key,
        .value = (uintptr_t)value,
        .flags = flags,
    };
    return call(BPF_MAP_UPDATE_ELEM, &attr);
}

int map_update_batch(int map, const void *keys, const void *values, uint32_t count)
{
    union bpf_attr attr = { .batch = {
                                .map_fd = map,
                                .keys = (uintptr_t)keys,
                                .values = (uintptr_t)values,
                                .count = count,
                            } };
    return call(BPF_MAP_UPDATE_BATCH, &attr);
}

int map_delete_batch(int map, const void *keys, uint32_t count)
{
    union bpf_attr attr = { .batch = {
                                .map_fd = map,
                                .keys = (uintptr_t)keys,
                                .count = count,
                            } };
    return call(BPF_MAP_DELETE_BATCH, &attr);
}
