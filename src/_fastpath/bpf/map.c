#include "bpf/map.h"

#include <errno.h>
#include <linux/bpf.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static int call(enum bpf_cmd command, union bpf_attr *attr)
{
    return syscall(SYS_bpf, command, attr, sizeof *attr) < 0 ? -errno : 0;
}

static int call_batch(enum bpf_cmd command, int map, const void *keys, const void *values,
                      uint32_t count)
{
    union bpf_attr attr;
    memset(&attr, 0, sizeof attr); /* the kernel wants all of the union zero that it does not use */
    attr.batch.map_fd = map;
    attr.batch.keys = (uintptr_t)keys;
    attr.batch.values = (uintptr_t)values;
    attr.batch.count = count;
    return call(command, &attr);
}

int map_update(int map, const void *key, const void *value, uint64_t flags)
{
    union bpf_attr attr;
    memset(&attr, 0, sizeof attr);
    attr.map_fd = map;
    attr.key = (uintptr_t)key;
    attr.value = (uintptr_t)value;
    attr.flags = flags;
    return call(BPF_MAP_UPDATE_ELEM, &attr);
}

int map_update_batch(int map, const void *keys, const void *values, uint32_t count)
{
    return call_batch(BPF_MAP_UPDATE_BATCH, map, keys, values, count);
}

int map_delete_batch(int map, const void *keys, uint32_t count)
{
    return call_batch(BPF_MAP_DELETE_BATCH, map, keys, NULL, count);
}
