/* The maps and constants of all programs: these are compiled as one unit (scripts/dev bpf). */
#ifndef DSEC_BPF_MAPS_H
#define DSEC_BPF_MAPS_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include "layout.h"

#define MAP(name, kind, key_type, value_type, entries, options) \
    struct {                                                     \
        __uint(type, kind);                                      \
        __type(key, key_type);                                   \
        __type(value, value_type);                               \
        __uint(max_entries, entries);                            \
        __uint(map_flags, options);                              \
    } name SEC(".maps")

MAP(bindings, BPF_MAP_TYPE_HASH, __u64, struct binding, 65536, BPF_F_NO_PREALLOC);
MAP(counts, BPF_MAP_TYPE_HASH, __u64, struct counters, 65536, BPF_F_NO_PREALLOC);
MAP(links, BPF_MAP_TYPE_HASH, __u32, struct link_value, 65536, BPF_F_NO_PREALLOC);
MAP(rules, BPF_MAP_TYPE_HASH, struct rule_key, struct ports, 1 << 20, BPF_F_NO_PREALLOC);
MAP(names, BPF_MAP_TYPE_HASH, struct name_key, struct name_ports, 1 << 20, BPF_F_NO_PREALLOC);
MAP(fragments, BPF_MAP_TYPE_LRU_HASH, struct fragment_key, __u8, 8192, 0);

struct {
    __uint(type, BPF_MAP_TYPE_RINGBUF);
    __uint(max_entries, 1 << 18);
} events SEC(".maps");

/* Set by the loader, constant for the verifier. */
const volatile __u32 sandbox_level = 2; /* depth of a sandbox's cgroup below the v2 root */
const volatile __u32 deny_unbound = 1;  /* the verdict on a cgroup without a binding */
const volatile __u32 events_per_s = 64; /* of one sandbox */

char _license[] SEC("license") = "Apache-2.0"; /* no helper in use asks for the GPL */

#endif
