/* The maps and constants of all programs: these are compiled as one unit (scripts/dev bpf).
 *
 * The kernel takes programs of a security module under a licence compatible with the GPL only. So
 * the files of this directory may also be used under the MIT licence or the GPL, version 2.
 */
#ifndef DSEC_LSM_MAPS_H
#define DSEC_LSM_MAPS_H

#include <linux/errno.h>
#include <linux/bpf.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include "kernel.h"
#include "layout.h"

#define MAP(map, key_type, value_type, entries)  \
    struct {                                      \
        __uint(type, BPF_MAP_TYPE_HASH);          \
        __type(key, key_type);                    \
        __type(value, value_type);                \
        __uint(max_entries, entries);             \
        __uint(map_flags, BPF_F_NO_PREALLOC);     \
    } map SEC(".maps")

MAP(bindings, __u64, struct binding, 65536);
MAP(roots, struct root_key, struct node, 1 << 20);
MAP(names, struct name_key, struct node, 1 << 21);
MAP(mount_types, struct type_key, __u32, 1 << 20);
MAP(abstracts, struct abstract_key, __u32, 1 << 20);

/* Set by the loader, constant for the verifier. */
const volatile __u32 sandbox_level = 2; /* depth of a sandbox's cgroup below the v2 root */

char _license[] SEC("license") = "Dual MIT/GPL";

#endif
